// Attention: thumbnails are computed, a head is selected by click and by keys, the URL reproduces the view, the worked example
// shows the numbers of the library.
import assert from "node:assert/strict";
import { saveFigure } from "./save-figure.mjs";

export async function run(page, url, facts) {
  await page.goto(`${url}#/attention?`);
  const grid = page.getByRole("grid", { name: /^Heads/ });
  const first = grid.getByRole("gridcell").first();
  await first.waitFor();

  // The thumbnails of a layer are loaded when it is visible.
  await page.waitForFunction(() => document.querySelector('[role="gridcell"]')?.getAttribute("aria-label")?.includes("entropy"));
  assert.match(await first.getAttribute("aria-label"), /^Block 0, head 0, .*entropy \d+\.\d+ bits/);

  await first.click();
  await page.getByRole("heading", { name: "Block 0 · head 0" }).waitFor();
  assert.match(page.url(), /head=0/);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Block 0 · head 1" }).waitFor();
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
  await page.getByRole("img", { name: /attends to “/ }).waitFor();

  // The URL reproduces the view.
  const link = page.url();
  await page.goto("about:blank");
  await page.goto(link);
  await page.getByRole("heading", { name: "Block 0 · head 1" }).waitFor();
  assert.match(await readout.innerText(), /\(1\) attends to/);

  await checkWorkedExample(page, url, facts);
  await checkHeadTypes(page, facts.head_types);

  const download = await saveFigure(page, "Attention pattern: save as CSV");
  assert.match(download.suggestedFilename(), /^attention-.*\.csv$/);
}

/** Heads are listed by type with their scores on random tokens; a click selects a head. */
async function checkHeadTypes(page, headTypes) {
  const list = page.getByRole("region", { name: "Head types" });
  await list.waitFor();
  assert.deepEqual((await list.locator("dt").allInnerTexts()).map((text) => text.replace(/^\S+\s+/, "")), headTypes.map(({ type }) => type));
  const rows = (await list.locator("dd").allInnerTexts()).map((text) => text.replace(/\s+/g, " ").trim());
  assert.deepEqual(rows, headTypes.map(({ text }) => text));
  const [{ type, heads }] = headTypes;
  const [{ block, head, score }] = heads;
  await list.getByRole("button", { name: `Block ${block}, head ${head}: ${type} ${score}` }).click();
  await page.getByRole("heading", { name: `Block ${block} · head ${head}` }).waitFor();
  await page.getByText(`${type} ${score}`, { exact: true }).waitFor(); // head type of the selected head
  const cell = page.getByRole("gridcell", { name: new RegExp(`^Block ${block}, head ${head}, `) });
  assert.match(await cell.getAttribute("title"), new RegExp(`${type} head \\(${score} on random tokens\\)`));
  const worked = page.getByRole("region", { name: "Worked example" });
  await worked.getByText(/^Weight by position type on this text and on random tokens$/).click();
  await worked.getByRole("row", { name: new RegExp(`^the ${type} .*${score}`) }).waitFor();
  await page.getByText("Weight on first token, mean over the queries of this text after the first").waitFor();
}

/** The worked example shows the numbers of the library; a masked key is named masked; a cell selects query and key. */
async function checkWorkedExample(page, url, { text, token_strs: tokenStrs, worked }) {
  const { attention, head, position, key } = worked;
  const address = (query, selected) => `${url}#/attention?text=${encodeURIComponent(text)}&attention=${attention}&head=${head}&position=${query}&key=${selected}`;
  const panel = page.getByRole("region", { name: "Worked example" });
  const heading = (query, selected) => panel.getByRole("heading", { name: `query “${tokenStrs[query]}”, key “${tokenStrs[selected]}”, head ${head} of block 3` });
  await page.goto(address(position, key));
  await heading(position, key).waitFor();
  const shown = (await panel.innerText()).replace(/\s+/g, " ");
  for (const expected of [
    `more terms, sum`, `= ${worked.dot}`, `score ${worked.score}; the model’s value at ${attention}.scores is ${worked.score}, equal within rounding`,
    `becomes the weight ${worked.weight}`, `has norm ${worked.z_norm} and equals the model’s value at ${attention}.z within rounding`,
    "3. Mask: visible", "6. Positions: RoPE", "sum 100.0 %", "Direct logit attribution of this head",
  ]) assert.ok(shown.includes(expected), `the worked example should contain “${expected}”: ${shown}`); // prettier-ignore
  assert.match(shown, /On this text, head \d+ of block 3 has (no position type above 40 %|\d+\.\d % of its weight on)/);
  assert.equal(await panel.locator("figure svg").count(), 3);

  // A key after the query is masked: never drawn as 0.
  await page.goto(address(1, 4));
  await heading(1, 4).waitFor();
  const maskedText = (await panel.innerText()).replace(/\s+/g, " ");
  assert.match(maskedText, /3\. Mask: masked/);
  assert.match(maskedText, /is masked for .*: it comes after the query and the mask is causal/);
  assert.match(maskedText, /scores is −∞/);
  const mask = panel.getByRole("img", { name: /^Mask of query/ });
  await mask.focus();
  await page.keyboard.press("End");
  await panel.getByText(/^key “.*” \(\d+\): masked$/).waitFor();

  // A click on a cell of the attention pattern selects query and key.
  const canvas = page.getByRole("application").locator("canvas");
  const { width, height } = await canvas.boundingBox();
  await canvas.click({ position: { x: width - 4, y: height - 4 } });
  const last = tokenStrs.length - 1;
  await heading(last, last).waitFor();
  assert.match(page.url(), new RegExp(`key=${last}&position=${last}`));
  await panel.getByLabel("Key", { exact: true }).selectOption("0");
  await heading(last, 0).waitFor();
  assert.match(page.url(), /key=0/);
}
