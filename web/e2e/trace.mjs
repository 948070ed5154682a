// Trace: values equal those of the library; every site opens; figures are downloaded; the URL reproduces the view.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { saveFigure } from "./save-figure.mjs";

/** An empty text is an error of the server. */
export const expected = /status of 400/;

export async function run(page, url, facts) {
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}`);
  const rows = page.getByRole("listbox", { name: "Residual stream from embedding to logits" }).getByRole("option");
  await page.getByText("logit lens unchanged from here").waitFor();
  assert.equal(await rows.count(), facts.points.length);
  for (const [number, point] of facts.points.entries()) {
    const label = await rows.nth(number).getAttribute("aria-label");
    assert.ok(label.includes(`norm ${point.norm}`), `${label} should contain ${point.norm}`);
    assert.ok(label.includes(`logit lens ${point.top_token}`), `${label} should contain ${point.top_token}`);
  }
  await page.getByText("logit lens unchanged from here").waitFor();
  for (const check of ["embedding + all additions = residual stream", "attention rows sum to 1", "cached = uncached"]) {
    assert.match(await page.locator(".check", { hasText: check }).innerText(), /✓/);
  }
  // The prediction, with a link to the sublayer from which on the logit lens shows it.
  assert.ok((await page.locator(".prediction").innerText()).includes(facts.points.at(-1).top_token));
  const fixedLink = page.locator(".prediction").getByRole("button", { name: / of block \d+$/ });
  await rows.nth(0).click();
  await fixedLink.click();
  const [sublayer, block] = (await fixedLink.innerText()).match(/^(.*) of block (\d+)$/).slice(1);
  await page.getByRole("heading", { name: new RegExp(`^${sublayer}: .* block ${block}$`, "i") }).waitFor();

  const next = page.getByRole("img", { name: facts.next_tokens[0] });
  await next.waitFor();
  assert.equal(await next.getAttribute("aria-label"), facts.next_tokens.join(", "));

  // A predicted token is appended to the text and becomes the selected token.
  const append = page.getByRole("group", { name: "Append a token to the text" }).getByRole("button").first();
  const appended = (await append.innerText()).trim();
  await append.click();
  await page.getByRole("heading", { name: `Residual stream of ${appended}` }).waitFor();
  await page.goBack();

  // Values at positions chosen at random.
  for (const { site, position, value, index } of facts.values) {
    const response = page.waitForResponse(async (candidate) => candidate.url().endsWith("/query/activation") && (candidate.request().postData() ?? "").includes(`"${site}"`));
    await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&position=${position}&site=${site}`);
    await response;
    const heatmap = page.getByRole("img", { name: /Arrow keys show values/ });
    await heatmap.waitFor();
    await page.waitForTimeout(150);
    await heatmap.focus();
    await page.keyboard.press("Home");
    for (let step = 0; step < index; step++) await page.keyboard.press("ArrowRight");
    const readout = await page.locator(".readout").innerText();
    assert.ok(readout.endsWith(`: ${value}`), `${site} at position ${position}, index ${index}: the page shows ${readout}, the library ${value}`);
  }

  // Keyboard: the token strip and the rows of the residual stream.
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
  const link = page.url();
  const heading = await page.getByRole("region", { name: "Activation" }).getByRole("heading").first().innerText();
  await page.goto("about:blank");
  await page.goto(link);
  await page.getByRole("heading", { name: heading }).waitFor();

  // Every site of the attention sublayer opens.
  for (const label of ["norm", "query", "key", "value", "position", "scores", "mask", "pattern", "head outputs", "out", "add"]) {
    await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&site=blocks.1.attn.in`);
    const toolbar = page.getByRole("toolbar", { name: "Sites of this sublayer" });
    await toolbar.getByRole("button", { name: label, exact: true }).click();
    await page.locator(".formulas math").first().waitFor();
    assert.match(await page.locator(".sentence").innerText(), /\d.*\.$/, `${label} has a sentence with numbers`);
  }
  // The mask of the last token has no masked key, the mask of an earlier one is hatched; the norm is the one of the library.
  const last = facts.token_strs.length - 1;
  const panel = page.getByRole("region", { name: "Activation" });
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&site=blocks.1.attn.mask`);
  await panel.getByText(`The last token sees all ${last + 1} tokens; no key is masked.`).waitFor();
  assert.equal(await panel.locator(".legend .masked").count(), 0);
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&site=blocks.1.attn.mask&position=2`);
  await panel.getByText(`sees 3 tokens (tokens 0 to 2) of ${last + 1}; ${last - 2} later tokens masked (causal mask).`).waitFor();
  assert.equal(await panel.locator(".legend .masked").count(), 1);
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&site=final_norm`);
  await panel.getByText(`Divides the residual stream by its RMS ${facts.final_rms} and multiplies by the learned gains`).waitFor();
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&site=blocks.1.attn.out`);
  await page.getByText("Python code", { exact: true }).click();
  assert.match(await page.getByLabel("Python code").innerText(), /ct\.trace\(model/);

  // Temperature 0 leaves one candidate.
  await page.getByLabel(/temperature/).focus();
  await page.keyboard.press("Home");
  await page.getByText("1 candidate to sample from").waitFor();

  // Figures can be downloaded.
  await page.locator(".plot path.ramp").first().waitFor();
  for (const format of ["SVG", "PNG", "CSV"]) {
    const download = await saveFigure(page, `Residual stream, from embedding to logits: save as ${format}`);
    assert.equal(download.suggestedFilename(), `residual-stream.${format.toLowerCase()}`);
    if (format !== "SVG") continue;
    const svg = await readFile(await download.path(), "utf8");
    assert.ok(!/var\(--|color-mix|oklab/.test(svg), "colors in the SVG are rgb() values");
    const numRamps = await page.locator(".plot path.ramp").count();
    assert.ok(numRamps > 0);
    assert.ok((svg.match(/<path [^>]*fill="none"[^>]* stroke="rgb\(/g) ?? []).length >= numRamps, "every ramp has a color");
  }

  // A text without tokens clears the figures of the previous one; the next text is drawn.
  const prompt = page.getByLabel("Text", { exact: true }).and(page.locator("textarea"));
  await prompt.fill("");
  await page.getByText("the text has no tokens").waitFor();
  assert.equal(await rows.count(), 0);
  assert.equal(await strip.getByRole("option").count(), 0);
  await prompt.fill("import os");
  await page.getByText("logit lens unchanged from here").waitFor();
  assert.equal(await page.title(), "Trace · tiny-english · cutaway");

  // A fractional position in the URL is truncated; the first Tab focuses the top of the page.
  await page.goto("about:blank");
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.text)}&position=1.5`);
  await page.getByText("logit lens unchanged from here").waitFor();
  assert.equal(await strip.getByRole("option", { selected: true }).getAttribute("title"), "token 1");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement?.closest("header") !== null), true);

  // What the prediction depends on is measured: the token, the sublayers and the heads.
  await page.goto(`${url}#/trace?text=${encodeURIComponent("The birds in the park")}`);
  await page.getByText("It depends most on “·birds” (token 1): without attention to this token, the prediction is “·was”").waitFor();
  await page.getByText("“·were” does not occur in the text, so it is not copied").waitFor();
  await page.getByText(/of 12 sublayers (is|are) necessary on this text/).waitFor();
  const components = page.getByRole("table", { name: "Effect of each component" });
  await components.getByText("embedding", { exact: true }).first().waitFor(); // the direct contributions are another query
  // The counts of the sentence are those of the table: rows whose prediction changes in both columns, or in one.
  const summary = await page.locator(".prediction").innerText();
  const [both] = summary.match(/(\d+) of 12 sublayers/).slice(1).map(Number);
  const one = Number((summary.match(/(One|\d+) others? changes? it with one of the two only/)?.[1] ?? "0").replace("One", "1"));
  const changedCells = await components.getByRole("row").evaluateAll((elements) => elements.map((row) => row.querySelectorAll(".changed").length));
  assert.deepEqual([both, one], [changedCells.filter((count) => count === 2).length, changedCells.filter((count) => count === 1).length]);
  assert.equal(await components.getByRole("row").count(), 1 + 1 + 12); // header, embedding, sublayers
  await page.getByText("Heads with the largest effect").waitFor();
  const effects = await page.locator("li", { has: page.getByRole("button", { name: /^head \d/ }) }).locator(".number:first-of-type").allInnerTexts();
  const sizes = effects.map((text) => Math.abs(Number(text.replaceAll("−", "-"))));
  assert.ok(sizes.length > 0 && sizes.length <= 8 && sizes.every((size) => size >= 0.0099 * sizes[0]), effects.join(", "));
  // The table of attention weights says that a weight is not an effect, and leads to the measured effects.
  await page.getByText("A weight is not an effect").waitFor();
  await page.getByRole("button", { name: "Measured effects of the tokens" }).click();
  assert.ok(await page.evaluate(() => document.activeElement?.querySelector('[aria-label="Effect of attention to each token"]') !== null));

  // Whether the prediction is copied is said in any case: from one occurrence, from several, or not from the text.
  const statement = page.locator(".prediction");
  for (const { text, sentence } of facts.copied) {
    await page.goto(`${url}#/trace?text=${encodeURIComponent(text)}`);
    await statement.getByText(sentence).waitFor();
  }
  await page.getByText("· is a space", { exact: true }).waitFor();
  await page.goto(`${url}#/trace?text=Once`);
  await page.getByText("· is a space", { exact: true }).waitFor({ state: "detached" });
  await page.goto(`${url}#/trace?text=${encodeURIComponent("One\nTwo")}`);
  await page.getByText("↵ is a line break", { exact: true }).waitFor();

  // With an active edit, the page says why there are no interventions; the button resets the edits.
  await page.goto(`${url}#/trace?text=${encodeURIComponent("The birds in the park")}&edits=blocks.3:skip`);
  await statement.getByText("What it depends on is measured on the unedited model only.").waitFor();
  await page.getByText("What the prediction depends on is measured on the unedited model only.").waitFor();
  await statement.getByRole("button", { name: "Reset the edits" }).click();
  await statement.getByText("It depends most on “·birds” (token 1)").waitFor();
  assert.ok(!page.url().includes("edits="), page.url());

  // Another token, by typing it: the sum of its direct contributions is its logit.
  await page.getByLabel("Another token:").fill("was");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: /^What ·was .* depends on$/ }).waitFor();
  await page.getByText(/direct contribution of each output to the logit of ·was/).waitFor();
  await page.getByRole("button", { name: "predicted token" }).click();
  await page.getByRole("heading", { name: /^What ·were .* depends on$/ }).waitFor();
  await page.getByRole("button", { name: /^head \d of the attention of block \d$/ }).first().click();
  await page.getByText("Attention patterns of all heads").waitFor();

  // An example of a pretrained model sets the text, the edits and the screen, and says what the edit shows. Its button
  // names the screen if this is another one.
  const exampleButton = page.getByRole("button", { name: `${facts.example.title} → Edit`, exact: true });
  await exampleButton.click();
  await page.getByRole("button", { name: facts.example.title, exact: true, pressed: true }).waitFor();
  assert.equal(await exampleButton.count(), 0);
  await page.getByText(facts.example.about).waitFor();
  await page.getByText(/top-5 overlap/).waitFor();
  assert.equal(await prompt.inputValue(), facts.example.fragment.text);
  assert.ok(decodeURIComponent(page.url()).includes(`edits=${facts.example.fragment.edits}`), page.url());
}
