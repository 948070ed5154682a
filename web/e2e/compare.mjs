// Compare: an example pair, the sentence about both answers, a patch set by clicking a cell, its effect in both directions, combined patches,
// texts with the same answer, the choice of the metric's tokens, and the hints about the changed text.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  const { compare } = facts;
  await page.goto(`${url}#/compare?`);
  await page.getByRole("heading", { name: "Compare two texts" }).waitFor();
  await page.getByRole("button", { name: compare.title, exact: true }).click();
  assert.equal(await page.locator("#prompt").inputValue(), compare.texts.clean);
  assert.equal(await page.locator("#changed").inputValue(), compare.texts.changed);
  const differing = page.getByRole("list", { name: "Tokens of the changed text" }).locator("mark");
  await differing.waitFor();
  assert.deepEqual(await differing.allInnerTexts(), ["·boy"]);

  // The answers and the logit differences are those of the library.
  const answers = page.getByRole("region", { name: "Answers" });
  await answers.getByText(`With “·boy” instead of “·girl”, the next token changes from “${compare.answers[0]}”`).waitFor();
  const sentence = await answers.locator(".sentence").innerText();
  assert.ok(sentence.includes(`goes from ${compare.differences[0]} to ${compare.differences[1]}`), sentence);

  // A click on a cell sets the patch; its effect is that of ct.edit.
  const map = page.getByRole("img", { name: /^Residual stream: restored share/ });
  await map.waitFor();
  await page.waitForFunction(() => !document.querySelector('[aria-label="Activation patching"] [role=status]'));
  assert.equal(await page.locator(".summary").innerText(), compare.summary);
  await clickCell(page, map, compare.row - 1, compare.position);
  await page.getByRole("region", { name: "Patches" }).getByText(`after block ${compare.row - 2} from the clean run`).waitFor();
  await clickCell(page, map, compare.row, compare.position); // replaces the patch
  const patched = page.getByRole("region", { name: "Patches" });
  const effect = patched.locator(".sentence");
  await effect.waitFor();
  assert.match(await effect.innerText(), new RegExp(`^Copying the residual stream of “·girl” \\(token ${compare.position}\\) after block ${compare.row - 1} from the clean run into the changed run restores ${compare.patches.forward.share} of the logit difference “·she” − “·he”:`));
  await patched.getByText(`without patches → ${compare.patches.forward.difference} with this patch`).waitFor();
  assert.match(decodeURIComponent(page.url()), /patches=blocks\.4\.resid_pre@1/);

  // The other direction.
  await page.getByRole("button", { name: "changed → clean" }).click();
  await patched.getByText(`from the changed run into the clean run moves the logit difference “·she” − “·he” by ${compare.patches.reverse.share}`).waitFor();
  await patched.getByText(`without patches → ${compare.patches.reverse.difference} with this patch`).waitFor();
  await patched.getByText("Python code", { exact: true }).click();
  assert.match(await patched.locator("pre").innerText(), /ct\.edit\(model/);

  // The URL reproduces the view.
  const link = page.url();
  await page.goto("about:blank");
  await page.goto(link);
  await patched.getByText(compare.patches.reverse.difference).first().waitFor();
  assert.equal(await page.getByRole("button", { name: "changed → clean" }).getAttribute("aria-pressed"), "true");

  // Head outputs, with the keyboard: Enter replaces the patch, Shift+Enter or the checkbox combines patches; they are removed one by one.
  await page.getByLabel("Patched activation").selectOption({ label: "Attention heads, all tokens" });
  const heads = page.getByRole("img", { name: /^Attention heads: share/ });
  await heads.waitFor();
  await page.waitForFunction(() => !document.querySelector('[aria-label="Activation patching"] [role=status]'));
  await heads.focus();
  await page.keyboard.press("End");
  await page.keyboard.press("Shift+Enter");
  await patched.getByText("Copying these 2 activations").waitFor();
  await page.keyboard.press("Home");
  await page.keyboard.press("Enter");
  await patched.getByText(/^Copying the output of head 0 of the attention of block 0 at all aligned tokens/).waitFor();
  await page.getByLabel("combine patches").check();
  await heads.focus();
  await page.keyboard.press("End");
  await page.keyboard.press("Enter");
  await patched.getByText("Copying these 2 activations").waitFor();
  await patched.getByRole("button", { name: /^Remove the output of head 0/ }).click();
  await patched.getByText(/^Copying the output of head 7 of the attention of block 5 at all aligned tokens/).waitFor();
  await patched.getByRole("button", { name: /^Remove the output/ }).click();
  await patched.waitFor({ state: "detached" });

  // Differences: the head with the largest distance, another one by click, a site, the logit lens.
  await page.getByText(/^Total variation distance between/).waitFor();
  await page.getByRole("img", { name: /^Self-attention difference/ }).focus();
  await page.keyboard.press("Home");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Head 0 of the attention of block 0" }).waitFor();
  await page.getByLabel("Site").selectOption("embed");
  await page.getByText("Cosine similarity of both vectors 1.000").waitFor(); // the selected token is the same in both texts
  await page.getByText(/^The top tokens of the logit lens differ first after block/).waitFor();
  await page.getByText(/The contributions add up to the logit difference of each text/).waitFor();

  // Texts of different length are aligned; equal texts have nothing to restore.
  const input = page.getByRole("region", { name: "Changed text" });
  await page.locator("#changed").fill("The little boy was sad because");
  await input.getByText("The texts have 5 and 6 tokens. Their predictions are compared").waitFor();
  await input.getByRole("button", { name: "Copy the clean text" }).click();
  await page.getByText("Patching is not measured here: both texts are equal, so there is no difference to restore").waitFor();
  assert.equal(await page.locator("#changed").inputValue(), compare.texts.clean);

  await checkSameAnswers(page, url, compare.same);
  await checkSuggestion(page, url);
  await checkPatchesOfOtherTexts(page, url, compare.texts);
  await checkNoAlignedTokens(page, url);
}

/** Patches are removed when a text changes, and a patch of a link that does not fit the texts is explained. No query fails: run-tests.mjs fails otherwise. */
async function checkPatchesOfOtherTexts(page, url, { clean, changed }) {
  const open = async (changedText, patches) => {
    await page.goto("about:blank");
    await page.goto(`${url}#/compare?text=${encodeURIComponent(clean)}&changed=${encodeURIComponent(changedText)}&patches=${patches}`);
  };
  const panel = page.getByRole("region", { name: "Activation patching" });
  const patched = page.getByRole("region", { name: "Patches" });
  const isRemoved = () => page.waitForFunction(() => !location.hash.includes("patches="));
  const last = "blocks.4.resid_pre@4";
  await open(changed, last);
  await patched.getByText(/^Copying the residual stream of “·because” \(token 4\)/).waitFor();
  await page.locator("#prompt").fill("The girl");
  await isRemoved();
  await patched.waitFor({ state: "detached" });
  await panel.getByRole("img", { name: /^Residual stream: restored share/ }).waitFor();

  await open(changed, last);
  await patched.locator(".sentence").waitFor();
  await page.locator("#changed").fill("The dog was sad because");
  await isRemoved();
  await patched.waitFor({ state: "detached" });

  // Token 1 has no counterpart in a longer text, and token 40 does not exist; token 2 is aligned.
  await open("The little boy was sad because", "blocks.4.resid_pre@1,blocks.4.resid_pre@40,blocks.4.resid_pre@2");
  await panel.getByText("2 patches of the URL are not applied, because no token of the changed text is aligned with their tokens: blocks.4.resid_pre at token 1, blocks.4.resid_pre at token 40.").waitFor();
  await patched.getByText(/^Copying the residual stream of “·was” \(token 2\)/).waitFor();
  await panel.getByRole("button", { name: "Remove from the URL" }).click();
  await panel.getByText("not applied").waitFor({ state: "detached" });
  assert.match(decodeURIComponent(page.url()), /patches=blocks\.4\.resid_pre@2$|patches=blocks\.4\.resid_pre@2&/);
}

/** Texts without aligned tokens: one sentence instead of the map, no empty panel, and no patch. */
async function checkNoAlignedTokens(page, url) {
  await page.goto(`${url}#/compare?text=One+day,+a+little+boy&changed=Tom+was+sad+because+he&patches=blocks.4.resid_pre@4`);
  const panel = page.getByRole("region", { name: "Activation patching" });
  await panel.getByText("Patching is not measured here: the texts share no aligned tokens, so no activation can be copied; use the same text with one word changed.").waitFor();
  await page.getByRole("region", { name: "Changed text" }).getByText("The texts have 6 and 5 tokens, and no tokens are aligned.").waitFor();
  await page.getByRole("region", { name: "Direct logit attribution" }).getByRole("heading", { name: /^Direct contributions to/ }).waitFor();
  assert.equal(await page.getByRole("region", { name: "Residual stream" }).count(), 0);
  assert.equal(await page.getByRole("region", { name: "Patches" }).count(), 0);
  assert.equal(await page.getByRole("alert").count(), 0);
}

/** Texts with the same answer: the log-probability of one token is measured, and other tokens can be chosen. */
async function checkSameAnswers(page, url, same) {
  await page.goto(`${url}#/compare?text=${encodeURIComponent(same.texts[0])}&changed=${encodeURIComponent(same.texts[1])}`);
  const panel = page.getByRole("region", { name: "Activation patching" });
  const measured = async ({ name, clean, changed, summary }) => {
    await panel.getByText(`Metric: ${name}, ${clean} in the clean run, ${changed} in the changed run.`).waitFor();
    await panel.getByRole("img", { name: `Residual stream: restored share, ${name}` }).waitFor();
    await page.waitForFunction(() => !document.querySelector('[aria-label="Activation patching"] [role=status]'));
    assert.equal(await panel.locator(".summary").innerText(), summary);
  };
  await measured(same.metrics[0]);
  const tokens = panel.getByRole("group", { name: "Tokens of the metric" });
  await tokens.getByLabel("Answer token").fill(same.typed[0]);
  await page.keyboard.press("Enter");
  await tokens.getByLabel("minus token").fill(same.typed[1]);
  await page.keyboard.press("Enter");
  await measured(same.metrics[1]);
  await page.getByRole("region", { name: "Answers" }).getByText(`${same.metrics[1].name}: ${same.metrics[1].clean}`).waitFor();
  await page.getByRole("region", { name: "Direct logit attribution" }).getByRole("heading", { name: `Direct contributions to the ${same.metrics[1].name}` }).waitFor();
  assert.match(page.url(), /answer=\d+&changed=.*&incorrect=\d+/);
  const link = page.url();
  await page.goto("about:blank");
  await page.goto(link);
  await measured(same.metrics[1]);
  await tokens.getByRole("button", { name: "default tokens" }).click();
  await measured(same.metrics[0]);
  const map = panel.getByRole("img", { name: /^Residual stream: restored share/ });
  await map.focus();
  await page.keyboard.press("Home");
  await page.keyboard.press("Enter");
  const patched = page.getByRole("region", { name: "Patches" });
  await patched.getByText(`of the change of the ${same.metrics[0].name}`).waitFor();
  await patched.getByText("Python code", { exact: true }).click();
  assert.match(await patched.locator("pre").innerText(), /# metric: log-probability of ' /);
}

/** Without a changed text there is a hint and a proposal; a later change of the clean text is pointed out. */
async function checkSuggestion(page, url) {
  await page.goto(`${url}#/compare?text=The+dog+ran+to+the`);
  const input = page.getByRole("region", { name: "Changed text" });
  await input.getByText("No changed text: enter the clean text with one word changed.").waitFor();
  assert.equal(await page.locator("#changed").inputValue(), "");
  const proposal = input.getByRole("button", { name: /^Use “/ });
  const text = (await proposal.innerText()).slice("Use “".length, -1);
  await proposal.click();
  await input.getByRole("list").locator("mark").waitFor();
  assert.equal(await input.getByRole("list").locator("mark").count(), 1);
  assert.equal(await page.locator("#changed").inputValue(), text);
  await page.getByRole("region", { name: "Answers" }).waitFor();
  await page.locator("#prompt").fill("The girl was");
  await input.getByText("The texts have 3 and 5 tokens.").waitFor();
  await page.getByRole("region", { name: "Answers" }).waitFor();
  await page.locator("#changed").fill("");
  await input.getByText("No changed text").waitFor();
  await page.getByRole("region", { name: "Answers" }).waitFor({ state: "detached" });
}

/** Row labels are left of the cells and column labels above: the cells end at the right and bottom edge of the canvas. */
async function clickCell(page, canvas, row, column) {
  const label = page.locator(".readout", { hasText: `(token ${column}), after block ${row - 1}:` });
  await canvas.scrollIntoViewIfNeeded();
  const box = await canvas.boundingBox();
  for (let y = 4; y < box.height; y += 6) {
    for (let x = 4; x < box.width; x += 8) {
      await page.mouse.move(box.x + x, box.y + y);
      if (await label.count()) return page.mouse.click(box.x + x, box.y + y);
    }
  }
  throw new Error(`there is no cell of token ${column} after block ${row - 1}`);
}
