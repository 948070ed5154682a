// Trace: what is shown is what Python says; the answer's place is marked; every stage opens; a link leads back.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";

/** An empty text is refused. */
export const expected = /status of 400/;

export async function run(page, url, facts) {
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}`);
  const rows = page.getByRole("listbox", { name: "The stream from embedding to answer" }).getByRole("option");
  await page.getByText("prediction fixed here").waitFor();
  assert.equal(await rows.count(), facts.points.length);
  for (const [number, point] of facts.points.entries()) {
    const said = await rows.nth(number).getAttribute("aria-label");
    assert.ok(said.includes(`length ${point.length}`), `${said} should tell ${point.length}`);
    assert.ok(said.includes(`would say ${point.says}`), `${said} should tell ${point.says}`);
  }
  await page.getByText("prediction fixed here").waitFor();
  for (const proof of ["embedding + all additions = stream", "attention’s rows sum to 1", "with a cache = without"]) {
    assert.match(await page.locator(".proof", { hasText: proof }).innerText(), /✓/);
  }
  // The answer, and a way back to where the prediction was fixed.
  assert.ok((await page.locator(".answer").innerText()).includes(facts.points.at(-1).says));
  const fixed = page.getByRole("button", { name: /^fixed after / });
  await rows.nth(0).click();
  await fixed.click();
  const [part, block] = (await fixed.innerText()).match(/^fixed after (.*) of block (\d+)$/).slice(1);
  await page.getByRole("heading", { name: new RegExp(`^${part}: .* block ${block}$`, "i") }).waitFor();

  const next = page.getByRole("img", { name: facts.next[0].said });
  await next.waitFor();
  assert.equal(await next.getAttribute("aria-label"), facts.next.map((each) => each.said).join(", "));

  // Values at sites that Python chose at random.
  for (const { site, position, values, index } of facts.values) {
    const answered = page.waitForResponse(async (response) => response.url().endsWith("/query/activation") && (response.request().postData() ?? "").includes(`"${site}"`));
    await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&position=${position}&site=${site}`);
    await answered;
    const field = page.getByRole("img", { name: /Arrow keys read values/ });
    await field.waitFor();
    await page.waitForTimeout(150);
    await field.focus();
    await page.keyboard.press("Home");
    for (let step = 0; step < index; step++) await page.keyboard.press("ArrowRight");
    const told = await page.locator(".said").innerText();
    assert.ok(told.endsWith(`: ${values}`), `${site} at ${position}, number ${index}: the page says ${told}, Python ${values}`);
  }

  // Keys alone: the strip of tokens, the rows of the stream.
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}`);
  const strip = page.getByRole("listbox", { name: "Tokens" });
  await strip.getByRole("option", { selected: true }).focus();
  await page.keyboard.press("ArrowLeft");
  assert.match(page.url(), /position=\d+/);
  await rows.first().waitFor();
  await rows.nth(0).focus();
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("ArrowDown");
  assert.match(page.url(), /site=/);
  const there = page.url();
  const heading = await page.getByRole("region", { name: "Stage" }).getByRole("heading").first().innerText();
  await page.goto("about:blank");
  await page.goto(there);
  await page.getByRole("heading", { name: heading }).waitFor();

  // Every step of the rail opens.
  for (const label of ["norm", "query", "key", "value", "position", "scores", "mask", "weights", "head values", "out", "add"]) {
    await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&site=blocks.1.attn.in`);
    const rail = page.getByRole("toolbar", { name: "Steps of this part" });
    await rail.getByRole("button", { name: label, exact: true }).click();
    await page.locator(".formulas math").first().waitFor();
  }
  await page.getByText("As Python", { exact: true }).click();
  assert.match(await page.getByLabel("Python").innerText(), /ct\.trace\(model/);

  // Temperature: 0 leaves one token.
  await page.getByLabel(/temperature/).focus();
  await page.keyboard.press("Home");
  await page.getByText("1 token left to draw from").waitFor();

  // Every picture can be taken away.
  for (const kind of ["SVG", "PNG", "CSV"]) {
    const saved = page.waitForEvent("download");
    await page.getByRole("button", { name: `The stream, from embedding to answer: save as ${kind}` }).click();
    assert.equal((await saved).suggestedFilename(), `cutaway-stream.${kind.toLowerCase()}`);
    if (kind !== "SVG") continue;
    const drawing = await readFile(await (await saved).path(), "utf8");
    assert.ok(!/var\(--|color-mix|oklab/.test(drawing), "a drawing that stands alone has its colours written out");
    const ramps = await page.locator(".way path.ramp").count();
    assert.ok(ramps > 0);
    assert.ok((drawing.match(/<path [^>]*fill="none"[^>]* stroke="rgb\(/g) ?? []).length >= ramps, "every ramp has a colour");
  }

  // Of a text that cannot be read nothing is drawn, least of all the one before; the next text is.
  const box = page.getByLabel("Text", { exact: true }).and(page.locator("textarea"));
  await box.fill("");
  await page.getByText("the text has no tokens").waitFor();
  assert.equal(await rows.count(), 0);
  assert.equal(await strip.getByRole("option").count(), 0);
  await box.fill("import os");
  await page.getByText("prediction fixed here").waitFor();
  assert.equal(await page.title(), "Trace · tiny-python · cutaway");

  // A link to no whole place leads to the one before; the first Tab leads to the top of the page.
  await page.goto("about:blank");
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&position=1.5`);
  await page.getByText("prediction fixed here").waitFor();
  assert.equal(await strip.getByRole("option", { selected: true }).getAttribute("title"), "token 1");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement?.closest("header") !== null), true);
}
