// 512 and 1,000 tokens: the page stays responsive; no main-thread task takes more than facts.longest_task milliseconds of CPU time.
// CPU time, not wall-clock time: the latter depends on what else the machine runs.
import assert from "node:assert/strict";

/** A text longer than the context is an error of the server. */
export const expected = /status of 400/;

export async function run(page, url, facts) {
  await checkText(page, url, facts, facts.long, facts.long_tokens);
  await page.goto("about:blank");
  await checkText(page, facts.thousand_url, facts, facts.thousand, 1000);
  // Distant tokens are grouped; a search finds one of them.
  await page.getByText(/those with the largest attention weights have a lane/).waitFor();
  await page.getByLabel("Find a token").fill("Z");
  await page.getByText("1 of 1000 tokens").waitFor();
  await page.locator(".plot text.lane.found", { hasText: "Z" }).waitFor();
  // A text that is longer than the context has one message on all screens.
  await page.goto("about:blank");
  await page.goto(`${facts.thousand_url}#/trace?text=${encodeURIComponent("a".repeat(1100))}`);
  for (const screen of ["trace", "edit", "compare", "attention", "generate"]) {
    await page.evaluate((name) => { location.hash = location.hash.replace(/^#\/\w+/, `#/${name}`); }, screen);
    await page.getByText("the text has 1,100 tokens; the maximum context length of this model is 1,024 tokens").waitFor();
    assert.equal(await page.locator("main [role=alert]").count(), 1);
  }
}

async function checkText(page, url, facts, text, numTokens) {
  const browser = page.context().browser();
  await page.goto(`${url}#/trace?text=${encodeURIComponent(text)}`);
  const strip = page.getByRole("listbox", { name: "Tokens" });
  await page.waitForFunction((count) => document.querySelectorAll('[aria-label="Tokens"] [role="option"]').length === count, numTokens);
  const rows = page.getByRole("listbox", { name: "Residual stream from embedding to logits" }).getByRole("option");
  await rows.first().waitFor();
  await browser.startTracing(page, { categories: ["disabled-by-default-devtools.timeline"] });
  for (const position of [0, 100, 300, numTokens - 1]) {
    await strip.getByRole("option").nth(position).click();
    await page.waitForFunction((number) => location.hash.includes(`position=${number}`), position);
    await page.waitForLoadState("networkidle");
  }
  assertShortTasks("token selection", await browser.stopTracing(), facts);
  for (const screen of ["attention", "edit", "generate", "trace"]) {
    await browser.startTracing(page, { categories: ["disabled-by-default-devtools.timeline"] });
    await page.evaluate((name) => { location.hash = location.hash.replace(/^#\/\w+/, `#/${name}`); }, screen);
    await page.waitForTimeout(1500);
    await page.waitForLoadState("networkidle");
    if (screen === "generate" && numTokens === facts.long_tokens) await page.getByText("Shorten the prompt to generate").waitFor();
    assertShortTasks(screen, await browser.stopTracing(), facts);
  }
}

/** Check the CPU times (`tdur`, in microseconds) of the tasks of the page's main thread. */
function assertShortTasks(name, trace, facts) {
  const { traceEvents } = JSON.parse(trace.toString());
  const mainThreads = new Set(traceEvents.filter((event) => event.name === "thread_name" && event.args.name === "CrRendererMain").map((event) => `${event.pid} ${event.tid}`));
  const tasks = traceEvents.filter((event) => event.name === "RunTask" && mainThreads.has(`${event.pid} ${event.tid}`));
  assert.ok(tasks.length > 0, "the trace has no tasks of the main thread");
  const longTasks = tasks.map((task) => Math.round(task.tdur / 1000)).filter((duration) => duration > facts.longest_task);
  assert.deepEqual(longTasks, [], `${name}: tasks of ${longTasks.join(", ")} ms`);
}
