// 512 tokens: the page stays responsive; no main-thread task is longer than facts.longest_task milliseconds.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  await page.addInitScript(() => {
    window.longTasks = [];
    new PerformanceObserver((list) => list.getEntries().forEach((entry) => window.longTasks.push(Math.round(entry.duration)))).observe({ type: "longtask", buffered: true });
  });
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.long)}`);
  const strip = page.getByRole("listbox", { name: "Tokens" });
  await page.waitForFunction((count) => document.querySelectorAll('[aria-label="Tokens"] [role="option"]').length === count, facts.long_tokens);
  const rows = page.getByRole("listbox", { name: "Residual stream from embedding to logits" }).getByRole("option");
  await rows.first().waitFor();
  for (const position of [0, 100, 300, facts.long_tokens - 1]) {
    await strip.getByRole("option").nth(position).click();
    await page.waitForFunction((number) => location.hash.includes(`position=${number}`), position);
    await page.waitForLoadState("networkidle");
  }
  for (const screen of ["attention", "edit", "generate", "trace"]) {
    await page.evaluate((name) => { location.hash = location.hash.replace(/^#\/\w+/, `#/${name}`); }, screen);
    await page.waitForTimeout(1500);
    await page.waitForLoadState("networkidle");
    if (screen === "generate") await page.getByText("Shorten the prompt to generate").waitFor();
    const longTasks = await page.evaluate(() => window.longTasks.splice(0));
    assert.ok(Math.max(0, ...longTasks) <= facts.longest_task, `${screen}: tasks of ${longTasks.join(", ")} ms`);
  }
}
