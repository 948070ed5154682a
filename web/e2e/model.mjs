// Model: the diagram has the blocks and sizes of the open model, zooms to a head, has a tour, and the model can be changed.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  // The first visit shows the diagram and the tour. "Skip" closes it, and it stays closed.
  await page.goto(url);
  const diagram = page.getByRole("group", { name: "Block diagram" });
  const tour = page.getByRole("region", { name: "Tour" });
  await diagram.waitFor();
  assert.equal(await page.getByRole("link", { name: "Model", exact: true }).getAttribute("aria-current"), "page");
  await tour.getByText("1 of 6").waitFor();
  assert.match(await box(page, "input").getAttribute("class"), /highlighted/);
  await tour.getByRole("button", { name: "Next" }).click();
  await tour.getByText(/\b256 numbers from the embedding table/).waitFor();
  assert.match(await box(page, "embed").getAttribute("class"), /highlighted/);
  await tour.getByRole("button", { name: "Skip" }).click();
  await tour.waitFor({ state: "detached" });
  await page.reload();
  await diagram.waitFor();
  assert.equal(await tour.count(), 0);
  await page.getByRole("button", { name: "Tour", exact: true }).click();
  for (let step = 0; step < 5; step++) await tour.getByRole("button", { name: "Next" }).click();
  await tour.getByText(/Prediction for this text: “·/).waitFor();
  await page.keyboard.press("Escape");
  await tour.waitFor({ state: "detached" });

  await diagram.getByText("residual stream: 256 numbers per token").waitFor();

  // Sizes of tiny-english, and the prediction for the text.
  const { d_model: d, heads, layers, hidden, vocab_size: vocabSize } = facts.architecture;
  const strip = page.getByRole("listbox", { name: "block" });
  assert.equal(await strip.getByRole("option").count(), layers);
  await page.getByRole("img", { name: `repeated ${layers} times` }).waitFor();
  assert.match(await box(page, "attn").innerText(), new RegExp(`Attention[\\s\\S]*T × ${d}[\\s\\S]*${heads} heads · RoPE`));
  assert.match(await box(page, "ffn").innerText(), new RegExp(`hidden ${hidden} · gated SiLU`));
  assert.match(await box(page, "head").innerText(), new RegExp(`T × ${vocabSize.toLocaleString("en")}[\\s\\S]*tied`));
  assert.deepEqual(await boxOrder(page), ["input", "embed", "blocks", "attn.norm_in", "attn", "attn.add", "ffn.norm_in", "ffn", "ffn.add", "final_norm", "head", "prediction"]);
  await page.goto(`${url}#/model?text=${encodeURIComponent(facts.text)}`);
  const [token, ...probability] = facts.next_tokens[0].split(" ");
  await box(page, "prediction").getByText(probability.join(" ")).waitFor();
  assert.equal(await box(page, "prediction").locator("code").first().innerText(), token);

  // A box explains itself; its link opens the matching site.
  await box(page, "ffn.add").click();
  const explanation = page.getByRole("region", { name: "Explanation" });
  await explanation.getByRole("heading", { name: "Addition to the residual stream" }).waitFor();
  await explanation.getByText(`: ${d} numbers per token`).waitFor();
  await explanation.locator("math").first().waitFor();
  await explanation.getByRole("button", { name: /Residual stream in Trace/ }).click();
  assert.match(page.url(), /#\/trace\?.*site=blocks\.0\.resid_post/);
  await page.goBack();

  // Block 3, attention, head 2.
  await strip.getByRole("option").first().focus();
  for (let step = 0; step < 3; step++) await page.keyboard.press("ArrowRight");
  assert.equal(await strip.getByRole("option", { selected: true }).getAttribute("aria-label"), "Block 3");
  await box(page, "attn").focus();
  await page.keyboard.press("Enter");
  await page.getByRole("group", { name: "Steps of Attention" }).waitFor();
  assert.equal(await page.getByRole("group", { name: "Heads" }).getByRole("button", { name: /^Head \d+$/ }).count(), heads);
  await box(page, "attn.scores").click();
  await explanation.getByRole("heading", { name: /Scores/ }).waitFor();
  // The weights of the shown keys and of the others sum to 1.
  const weights = page.getByRole("region", { name: "One head" }).locator("tbody tr td:last-child");
  await weights.first().waitFor();
  const total = (await weights.allInnerTexts()).reduce((sum, text) => sum + Number.parseFloat(text.replace("<", "")), 0);
  assert.ok(Math.abs(total - 100) < 1, `the weights sum to ${total} %`);
  await page.getByRole("button", { name: "Head 2", exact: true }).click();
  assert.match(page.url(), /#\/attention\?attention=blocks\.3\.attn.*head=2/);
  await page.getByRole("heading", { name: "Attention patterns of all heads" }).waitFor();
  await page.goBack();
  await page.getByRole("navigation", { name: "Breadcrumb" }).getByRole("button", { name: "Model" }).click();
  await box(page, "ffn").click();
  await page.getByRole("group", { name: "Steps of FFN" }).waitFor();
  for (const name of ["gate", "up", "hidden", "down"]) await box(page, `ffn.${name}`).waitFor();
  await page.keyboard.press("Escape");
  await diagram.waitFor();

  // Other models: an encoder, an encoder-decoder, and presets with random weights.
  const select = page.getByRole("combobox", { name: "Model" });
  await select.selectOption({ label: "tiny-english-encoder" });
  await page.getByText("Predicted token").first().waitFor();
  assert.match(await page.locator("textarea").inputValue(), /\[MASK\]/);
  assert.ok(!page.url().includes("text="), page.url());
  await select.selectOption({ label: "tiny-dates" });
  await page.getByRole("heading", { name: "Encoder", exact: true }).waitFor();
  await box(page, "decoder.cross").waitFor();
  await page.locator("path.cross").waitFor({ state: "attached" });
  await box(page, "prediction").locator("code").first().waitFor();
  await box(page, "decoder.cross").click();
  await page.getByRole("button", { name: "Head 1", exact: true }).click();
  assert.match(page.url(), /attention=decoder\.blocks\.0\.cross&attention_group=cross&head=1/);
  await page.keyboard.press("1");
  await select.selectOption("preset:tiny-gemma");
  await page.getByText("untrained", { exact: false }).first().waitFor();
  await page.getByText("2 × window 8, 2 × full attention").waitFor();
  await box(page, "attn.norm_out").waitFor();
  await select.selectOption("preset:tiny-moe");
  await box(page, "ffn").getByText("2 of 4 experts").waitFor();
  await select.selectOption("preset:pythia-70m");
  await page.getByText("70.43 M parameters").first().waitFor();
  assert.deepEqual(await boxOrder(page), ["input", "embed", "blocks", "attn.norm_in", "attn", "ffn.norm_in", "ffn", "ffn.add", "final_norm", "head", "prediction"]);
  await select.selectOption({ label: "tiny-english" }); // the model of the other tests
  await page.getByText("5.80 M parameters").first().waitFor();
}

const box = (page, id) => page.locator(`[data-box="${id}"]`);
const boxOrder = (page) => page.locator("[data-box]").evaluateAll((elements) => elements.map((element) => element.dataset.box));
