// Follow: what is shown is what Python says; the answer's place is marked; every stage opens; a link leads back.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  await page.goto(`${url}#/follow?text=${encodeURIComponent(facts.text)}`);
  const rows = page.getByRole("listbox", { name: "The stream from embedding to answer" }).getByRole("option");
  await page.getByText("decided here").waitFor();
  assert.equal(await rows.count(), facts.points.length);
  for (const [number, point] of facts.points.entries()) {
    const said = await rows.nth(number).getAttribute("aria-label");
    assert.ok(said.includes(`length ${point.length}`), `${said} should tell ${point.length}`);
    assert.ok(said.includes(`would say ${point.says}`), `${said} should tell ${point.says}`);
  }
  await page.getByText("decided here").waitFor();
  for (const proof of ["embedding + all additions = stream", "attention’s rows sum to 1", "with a cache = without"]) {
    assert.match(await page.locator(".proof", { hasText: proof }).innerText(), /✓/);
  }
  const next = page.getByRole("img", { name: facts.next[0].said });
  await next.waitFor();
  assert.equal(await next.getAttribute("aria-label"), facts.next.map((each) => each.said).join(", "));

  // Values at sites that Python chose at random.
  for (const { site, at, values, index } of facts.values) {
    const answered = page.waitForResponse(async (response) => response.url().endsWith("/ask/stage") && (response.request().postData() ?? "").includes(`"${site}"`));
    await page.goto(`${url}#/follow?text=${encodeURIComponent(facts.text)}&at=${at}&site=${site}`);
    await answered;
    const field = page.getByRole("img", { name: /Arrow keys read values/ });
    await field.waitFor();
    await page.waitForTimeout(150);
    await field.focus();
    await page.keyboard.press("Home");
    for (let step = 0; step < index; step++) await page.keyboard.press("ArrowRight");
    const told = await page.locator(".said").innerText();
    assert.ok(told.endsWith(`: ${values}`), `${site} at ${at}, number ${index}: the page says ${told}, Python ${values}`);
  }

  // Keys alone: the strip of tokens, the rows of the stream.
  await page.goto(`${url}#/follow?text=${encodeURIComponent(facts.text)}`);
  const strip = page.getByRole("listbox", { name: "Tokens" });
  await strip.getByRole("option", { selected: true }).focus();
  await page.keyboard.press("ArrowLeft");
  assert.match(page.url(), /at=\d+/);
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
    await page.goto(`${url}#/follow?text=${encodeURIComponent(facts.text)}&site=blocks.1.attn.in`);
    const rail = page.getByRole("toolbar", { name: "Steps of this part" });
    await rail.getByRole("button", { name: label, exact: true }).click();
    await page.locator(".formulas math").first().waitFor();
  }
  await page.getByText("As Python", { exact: true }).click();
  assert.match(await page.getByLabel("Python").innerText(), /ct\.trace\(model/);

  // Temperature: 0 leaves one token.
  await page.getByLabel(/temperature/).focus();
  await page.keyboard.press("Home");
  await page.getByText("1 tokens left to draw from").waitFor();

  // Every picture can be taken away.
  for (const kind of ["SVG", "PNG", "CSV"]) {
    const saved = page.waitForEvent("download");
    await page.getByRole("button", { name: `The stream, from embedding to answer: save as ${kind}` }).click();
    assert.equal((await saved).suggestedFilename(), `cutaway-stream.${kind.toLowerCase()}`);
  }
}
