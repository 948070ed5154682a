// Attention: thumbnails are computed, a head is selected by click and by keys, the URL reproduces the view.
import assert from "node:assert/strict";

export async function run(page, url) {
  await page.goto(`${url}#/attention?`);
  const grid = page.getByRole("grid", { name: /^Heads/ });
  const first = grid.getByRole("gridcell").first();
  await first.waitFor();

  // The thumbnails of a layer are loaded when it is visible.
  await page.waitForFunction(() => document.querySelector('[role="gridcell"]')?.getAttribute("aria-label")?.includes("entropy"));
  assert.match(await first.getAttribute("aria-label"), /^Layer 0, head 0, .*entropy \d+\.\d+ bits/);

  await first.click();
  await page.getByRole("heading", { name: "Layer 0 · head 0" }).waitFor();
  assert.match(page.url(), /head=0/);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Layer 0 · head 1" }).waitFor();
  assert.match(page.url(), /attention=(decoder\.)?blocks\.0\.attn&head=1/);

  // Arrow keys show the weights of the matrix; with a causal mask the first token attends only to itself.
  const matrix = page.getByRole("application");
  await matrix.focus();
  for (let step = 0; step < 12; step++) await page.keyboard.press("ArrowUp");
  await page.keyboard.press("Home");
  const readout = page.getByRole("status").filter({ hasText: "attends to" });
  assert.match(await readout.innerText(), /\(0\) attends to .*\(0\): 1\.0000/);
  await page.keyboard.press("ArrowRight");
  assert.match(await readout.innerText(), /: masked$/);
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  assert.match(page.url(), /[?&]position=1/);
  await page.getByRole("img", { name: /attends to ‘/ }).waitFor();

  // The URL reproduces the view.
  const link = page.url();
  await page.goto("about:blank");
  await page.goto(link);
  await page.getByRole("heading", { name: "Layer 0 · head 1" }).waitFor();
  assert.match(await readout.innerText(), /\(1\) attends to/);

  const download = page.waitForEvent("download");
  await page.getByRole("button", { name: "Attention pattern: save as CSV" }).click();
  assert.match((await download).suggestedFilename(), /^attention-.*\.csv$/);
}
