// Attention: heads are real, a head is chosen by click and by keys, the address leads back to it.
import assert from "node:assert/strict";

export async function run(page, url) {
  await page.goto(`${url}#/attention?`);
  const wall = page.getByRole("grid", { name: /^Heads/ });
  const first = wall.getByRole("gridcell").first();
  await first.waitFor();

  // A layer is asked for when it is seen, each once.
  await page.waitForFunction(() => document.querySelector('[role="gridcell"]')?.getAttribute("aria-label")?.includes("entropy"));
  assert.match(await first.getAttribute("aria-label"), /^Layer 0, head 0, .*entropy \d+\.\d+ bits/);

  await first.click();
  await page.getByRole("heading", { name: "Layer 0 · head 0" }).waitFor();
  assert.match(page.url(), /head=0/);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Layer 0 · head 1" }).waitFor();
  assert.match(page.url(), /attention=(decoder\.)?blocks\.0\.attn&head=1/);

  // The matrix is read by keys; the first token of a text sees itself alone.
  const matrix = page.getByRole("application");
  await matrix.focus();
  for (let at = 0; at < 12; at++) await page.keyboard.press("ArrowUp");
  await page.keyboard.press("Home");
  const said = page.getByRole("status").filter({ hasText: "looks at" });
  assert.match(await said.innerText(), /\(0\) looks at .*\(0\): 1\.0000/);
  await page.keyboard.press("ArrowRight");
  assert.match(await said.innerText(), /hidden by the mask/);
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  assert.match(page.url(), /[?&]position=1/);
  await page.getByRole("img", { name: /looks at ‘/ }).waitFor();

  // What the page says is what the server says: by the same query.
  const there = page.url();
  const told = await said.innerText();
  await page.goto("about:blank");
  await page.goto(there);
  await page.getByRole("heading", { name: "Layer 0 · head 1" }).waitFor();
  assert.match(await said.innerText(), /\(1\) looks at/);
  assert.ok(told.length > 0);

  const saved = page.waitForEvent("download");
  await page.getByRole("button", { name: "Who looks at whom: save as CSV" }).click();
  assert.match((await saved).suggestedFilename(), /^attention-.*\.csv$/);
}
