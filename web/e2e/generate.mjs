// Generate: step, play, pause, force another token; the URL reproduces the text.
import assert from "node:assert/strict";
import { saveFigure } from "./save-figure.mjs";

export async function run(page, url) {
  await page.goto(`${url}#/generate?max_new_tokens=24`);
  await page.getByRole("heading", { name: "First token" }).waitFor();
  const tokens = page.getByRole("listbox", { name: "Generated tokens" }).getByRole("option");
  assert.equal(await tokens.count(), 0);

  await page.getByRole("button", { name: "Step", exact: true }).click();
  await page.getByRole("heading", { name: /^Token 1: / }).waitFor();
  assert.equal(await tokens.count(), 1);
  await page.getByText("Greedy decoding (temperature 0): the most likely token is always taken.").waitFor();
  await page.getByText("the last generated token has not been processed yet").waitFor();
  await page.getByText("Dotted underline").waitFor();
  await page.keyboard.press("ArrowRight");
  await page.getByRole("heading", { name: /^Token 2: / }).waitFor();
  assert.match(page.url(), /shown=2/);

  await page.evaluate(() => document.activeElement?.blur());
  await page.keyboard.press("Space");
  await page.waitForFunction(() => document.querySelectorAll('[aria-label="Generated tokens"] [role=option]').length >= 5);
  await page.evaluate(() => document.activeElement?.blur());
  await page.keyboard.press("Space");
  const paused = await tokens.count();
  await page.waitForTimeout(600);
  assert.equal(await tokens.count(), paused);
  assert.match(page.url(), new RegExp(`shown=${paused}`));
  await page.getByText("✓ Equal within tolerance").waitFor();

  // Forcing another token discards the later ones; the generation continues from it.
  const before = await tokens.allInnerTexts();
  await tokens.nth(1).click();
  const other = page.locator("table button:not([disabled])").first();
  await other.click();
  await page.getByText("selected by you", { exact: true }).waitFor();
  assert.equal(await tokens.count(), 2);
  const after = await tokens.allInnerTexts();
  assert.equal(after[0], before[0]);
  assert.notEqual(after[1], before[1]);
  await page.getByRole("button", { name: "Step", exact: true }).click();
  await page.getByRole("heading", { name: /^Token 3: / }).waitFor();

  const [link, texts] = [page.url(), await tokens.allInnerTexts()];
  assert.match(link, /forced=1%3A\d+/);
  await page.goto("about:blank");
  await page.goto(link);
  await page.getByRole("heading", { name: /^Token 3: / }).waitFor();
  assert.deepEqual(await tokens.allInnerTexts(), texts);

  const download = await saveFigure(page, /cache.*save as CSV/);
  assert.equal(download.suggestedFilename(), "kv-cache.csv");

  // Active edits apply to the generation: one request, and other tokens than without the edit.
  const requests = [];
  page.on("request", (request) => request.url().endsWith("/query/generate") && requests.push(request.postDataJSON()));
  await page.goto("about:blank");
  await page.goto(`${url}#/generate?text=${encodeURIComponent("The cat sat on the")}&edits=blocks.3:skip`);
  await page.getByText("Edited model: block 3: skipped").waitFor();
  await page.getByText(/tokens, also those not shown yet, were decoded with the KV cache/).waitFor();
  assert.equal(requests.length, 1);
  assert.deepEqual(requests[0].input.edits, { "blocks.3": { do: "skip" } });
}
