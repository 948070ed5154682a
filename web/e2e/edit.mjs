// Edit: edits are part of the URL, the values equal those of the library, a bar selects its token.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  // The values equal those of the library for the same edits.
  await page.goto(`${url}#/edit?${new URLSearchParams({ text: facts.text, edits: facts.edited.edits })}`);
  await page.getByText(/top-5 overlap/).waitFor();
  assert.deepEqual(await page.locator(".verdict dd").allInnerTexts(), facts.edited.values);

  await page.goto(`${url}#/edit?`);
  await page.getByText("No edits.").waitFor();
  const board = page.getByRole("grid", { name: "Edits" });

  const response = page.waitForResponse((candidate) => candidate.url().endsWith("/api/query/edit_effect"));
  await board.getByRole("button", { name: "block 0: swap" }).click();
  await response;
  await page.getByText("block 0: FFN before attention").waitFor();
  assert.match(decodeURIComponent(page.url()), /edits=blocks\.0:swap/);

  // Keyboard: the right arrow moves to the next button, Enter presses it.
  await board.getByRole("button", { name: "block 0: swap" }).focus();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  await page.getByText("block 0: no residual", { exact: true }).last().waitFor();
  assert.match(decodeURIComponent(page.url()), /edits=blocks\.0:no_residual/);

  await board.getByRole("button", { name: "block 1, head 1" }).click();
  await board.getByRole("button", { name: "model: no final norm" }).click();
  await page.getByText(/top-5 overlap/).waitFor();
  const link = page.url();
  const loss = page.locator("dl div", { hasText: "loss on this text" }).locator("dd");
  const lossText = await loss.innerText();
  assert.match(lossText, /→/);

  // The URL reproduces the view.
  await page.goto("about:blank");
  await page.goto(link);
  await page.getByText(/top-5 overlap/).waitFor();
  assert.equal(await loss.innerText(), lossText);
  assert.equal(await board.getByRole("button", { name: "block 1, head 1" }).getAttribute("aria-pressed"), "true");

  const strip = page.getByRole("slider", { name: /KL divergence by token/ });
  await strip.waitFor();
  await strip.click({ position: { x: 4, y: 60 } });
  assert.match(page.url(), /[?&]position=0/);
  await strip.press("ArrowRight");
  assert.match(page.url(), /[?&]position=1/);

  await page.getByRole("button", { name: "Reset" }).click();
  await page.getByText("No edits.").waitFor();
  assert.doesNotMatch(page.url(), /edits/);

  // Ablated and retrained results are distinguished.
  await page.getByText("ablated", { exact: true }).first().waitFor();
  await page.getByText("retrained", { exact: true }).first().waitFor();

  await page.getByRole("heading", { name: "Small models: ablated after training vs. trained without the component" }).waitFor();
  await page.getByText(facts.edited.unmasked).waitFor();

  // The link at the top moves the focus to the trained variants.
  await page.getByRole("button", { name: "trained variants" }).click();
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Trained variants: another norm, norm placement or position method");

  // Edits apply on the other screens until they are reset.
  await page.goto(`${url}#/trace?edits=blocks.1:skip`);
  await page.getByText("block 1: skipped").waitFor();
  await page.getByText("logit lens unchanged from here").waitFor();
  const rows = page.getByRole("listbox", { name: "Residual stream from embedding to logits" }).getByRole("option");
  const numRows = await rows.count();
  await page.getByRole("button", { name: "Reset", exact: true }).click();
  await page.waitForFunction((count) => document.querySelectorAll('[aria-label="Residual stream from embedding to logits"] [role="option"]').length > count, numRows);

  // The experiment: the user predicts, then the loss on sampled texts and both continuations are shown.
  await page.goto("about:blank");
  await page.goto(`${url}#/edit?text=${encodeURIComponent("The cat sat on the")}&edits=mask:drop`);
  await page.getByText("On one short text the loss can fall by chance. The experiment below measures 16 texts.").waitFor();
  await page.getByRole("button", { name: "it falls", exact: true }).click();
  const experiment = await page.getByText("The prediction was another one.").innerText();
  const [low, high] = /difference [\d.]+ \(([\d.]+) to ([\d.]+)\)/.exec(experiment).slice(1).map(Number); // the sentence agrees with the interval
  assert.match(experiment, low >= 1 ? /^The loss rises by 1 nat or more\./ : high < 1 ? /^The loss rises by less than 1 nat\./ : /^The loss rises; the interval includes 1 nat/);
  await page.getByText("over 16 texts").waitFor();
  await page.getByText(/leakage, not a better model/).waitFor();
  await page.getByText("Greedy continuation without edits").waitFor();

  // Models trained with another component: a prediction, the losses of the results, both continuations, and the model on all screens.
  await page.getByRole("group", { name: "Positions", exact: true }).getByRole("button", { name: "ALiBi" }).click();
  await page.getByRole("button", { name: "about the same (within 0.02 nats)" }).click();
  await page.getByText(`${facts.variants.ALiBi.conclusion} This agrees with the prediction.`).waitFor();
  await page.getByText(/Greedy continuation, ALiBi/).waitFor();
  await page.getByRole("img", { name: /^Base: .* ALiBi: / }).waitFor();
  await page.getByText("All variants", { exact: true }).click();
  const variants = page.getByRole("region", { name: "Losses of all variants" }).locator("tbody tr");
  const names = (await variants.locator("th").allInnerTexts()).map((text) => text.split("\n")[0]);
  assert.deepEqual(names, ["RMSNorm, pre-norm, RoPE", ...Object.keys(facts.variants)]);
  assert.deepEqual((await variants.locator("td:nth-child(3)").allInnerTexts()).slice(1), Object.values(facts.variants).map(({ summary }) => summary));
  await checkVariantsLayout(page);
  // The result without a prediction: every conclusion is that of the interval.
  for (const [label, { conclusion }] of Object.entries(facts.variants)) {
    await page.getByRole("region", { name: "Trained variants" }).getByRole("button", { name: label, exact: true }).click();
    await page.getByRole("region", { name: "Trained variants" }).getByRole("button", { name: "show the result" }).click();
    await page.getByText(conclusion).waitFor();
  }
  await page.getByRole("group", { name: "Positions", exact: true }).getByRole("button", { name: "ALiBi" }).click();
  await page.getByRole("region", { name: "Trained variants" }).getByRole("button", { name: "show the result" }).click();
  await page.getByRole("button", { name: "Open this model on all screens" }).click();
  await page.waitForFunction(() => document.querySelector("select[aria-label=Model]")?.value === "pretrained:variants/alibi");
  await page.getByText("No edits.").waitFor();
  await page.getByRole("combobox", { name: "Model" }).selectOption("pretrained:tiny-english");
  await page.waitForFunction(() => document.title.includes("tiny-english"));
}

/** The table of all variants fits at 1280 px, scrolls inside its box at 390 px, and the section precedes the study of short training. */
async function checkVariantsLayout(page) {
  const table = page.getByRole("region", { name: "Losses of all variants" });
  for (const [width, fits] of [[390, false], [1280, true]]) {
    await page.setViewportSize({ width, height: 900 });
    await page.waitForTimeout(200);
    const [own, inner, pageWidth] = await table.evaluate((element) => [element.clientWidth, element.scrollWidth, document.documentElement.scrollWidth]);
    assert.equal(inner <= own, fits, `the table is ${inner} px wide in ${own} px at ${width} px`);
    assert.ok(pageWidth <= width, `the page is ${pageWidth} px wide at ${width} px`);
  }
  const headings = await page.getByRole("heading", { level: 3 }).allInnerTexts();
  const [variants, study] = ["Trained variants", "Small models"].map((start) => headings.findIndex((text) => text.startsWith(start)));
  assert.ok(variants >= 0 && variants < study, headings.join(" | "));
}
