// Exported page: every screen of the file shows its results without a server, without an error and without a console message.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  const messages = [];
  page.on("console", (message) => messages.push(`${message.type()}: ${message.text()}`));
  page.on("request", (request) => { if (!/^(file|data|blob):/.test(request.url())) messages.push(`request to ${request.url()}`); });
  await page.goto(`file://${facts.file}`);
  const screens = page.getByRole("navigation", { name: "Screens" }).getByRole("link");
  await page.getByRole("group", { name: "Block diagram" }).waitFor();
  assert.deepEqual(await screens.allInnerTexts(), ["Model", "Trace", "Edit", "Attention", "Generate", "Size", "Learn"]);
  assert.equal(await page.getByRole("combobox", { name: "Model" }).count(), 0);
  assert.equal(await page.locator("#prompt").getAttribute("readonly"), "", "another text has no results in the file");

  const openScreen = async (name) => {
    await screens.filter({ hasText: name }).click();
    await page.locator("main h2").first().waitFor();
  };
  const check = async (place) => {
    await page.waitForFunction(() => ![...document.querySelectorAll("main [role=status]")].some((status) => status.textContent.includes("…")));
    assert.doesNotMatch(await page.locator("main").innerText(), /this exported page contains only/, place);
    assert.deepEqual(await page.locator("main [role=alert]").allInnerTexts(), [], place);
    assert.deepEqual(messages, [], place);
  };

  // Model: the prediction, the steps of attention and FFN in every block, and the weights of a head.
  await page.locator('[data-box="prediction"] code').first().waitFor();
  await page.locator('[data-box="attn"]').click();
  await page.getByRole("button", { name: "Head 0" }).waitFor();
  const blocks = page.getByRole("listbox", { name: "block" }).getByRole("option");
  for (let block = 0; block < facts.architecture.layers; block++) {
    await blocks.nth(block).click();
    await page.getByRole("region", { name: "One head" }).locator("tbody tr").first().waitFor();
    await check(`Model, block ${block}`);
  }
  await page.keyboard.press("Escape");
  await page.locator('[data-box="ffn"]').click();
  await page.getByRole("group", { name: "Steps of FFN" }).waitFor();
  await check("Model, FFN");
  await page.keyboard.press("Escape");

  // Trace: every token and every site. The interventions are of the last token.
  await page.keyboard.press("2");
  const rows = page.getByRole("listbox", { name: "Residual stream from embedding to logits" }).getByRole("option");
  await page.getByText("logit lens unchanged from here").waitFor();
  assert.equal(await rows.count(), facts.points.length);
  for (const [number, point] of facts.points.entries()) {
    const label = await rows.nth(number).getAttribute("aria-label");
    assert.ok(label.includes(`norm ${point.norm}`) && label.includes(`logit lens ${point.top_token}`), label);
  }
  const dependence = page.getByRole("region", { name: "What the prediction depends on" });
  await dependence.getByRole("heading", { name: "Heads with the largest effect (zero ablation)" }).waitFor();
  const tokens = page.getByRole("listbox", { name: "Tokens", exact: true }).getByRole("option");
  for (let number = 0; number < (await tokens.count()); number += 3) {
    await tokens.nth(number).click();
    await check(`token ${number}`);
  }
  await tokens.first().click();
  await page.waitForTimeout(400); // longer than the delay of the interventions
  assert.equal(await dependence.count(), 0);
  await check("Trace, first token");
  await tokens.last().click();
  await dependence.waitFor();
  for (let row = 0; row < facts.points.length; row++) {
    await rows.nth(row).click();
    const sites = page.getByRole("toolbar", { name: "Sites of this sublayer" }).getByRole("button");
    for (let number = 0; number < (await sites.count()); number++) {
      await sites.nth(number).click();
      await page.locator(".formulas math").first().waitFor();
      await check(`row ${row}, site ${number}`);
    }
  }

  await openScreen("Edit");
  const edits = page.getByRole("grid", { name: "Edits" }).getByRole("button");
  const numEdits = await edits.count();
  assert.ok(numEdits >= 20, `${numEdits} edits`); // mask, positions, 6 blocks and their 12 sublayers
  for (const number of [0, 1, 2, 3, 4, 5, Math.floor(numEdits / 2), numEdits - 1]) {
    await edits.nth(number).click();
    await page.getByText("mean KL divergence").waitFor();
    await check(`edit ${number}`);
  }
  await edits.nth(numEdits - 1).click();
  await page.getByText("No edits.").waitFor();
  await edits.nth(0).click(); // edits apply on this screen only

  await openScreen("Attention");
  await page.getByRole("heading", { name: "Attention pattern", exact: true }).waitFor();
  await check("Attention");
  const worked = page.getByRole("region", { name: "Worked example" });
  await worked.getByRole("heading", { name: "1. Dot product q·k" }).waitFor();
  const heads = page.getByRole("grid", { name: /^Heads/ }).getByRole("gridcell");
  for (const number of [0, (await heads.count()) - 1]) {
    await heads.nth(number).click();
    await worked.getByRole("heading", { name: "1. Dot product q·k" }).waitFor();
    await check(`Attention, head ${number}`);
  }
  await page.getByRole("listbox", { name: "Tokens", exact: true }).getByRole("option").first().click();
  await worked.waitFor({ state: "detached" });
  await check("Attention, first token");

  await openScreen("Generate");
  await page.getByRole("heading", { name: "First token" }).waitFor();
  for (let step = 0; step < 12; step++) await page.keyboard.press("ArrowRight");
  await page.getByRole("heading", { name: /^Token 12: / }).waitFor();
  await check("Generate");

  await openScreen("Size");
  await page.getByRole("heading", { name: "Parameters", exact: true }).waitFor();
  const device = page.getByLabel("Device");
  for (const name of await device.locator("option").evaluateAll((options) => options.map((option) => option.value))) {
    await device.selectOption(name);
    for (const mode of ["training", "inference"]) {
      await page.getByLabel(mode, { exact: true }).check();
      await page.getByText("Maximum context length").waitFor();
      await check(`Size, ${name}, ${mode}`);
    }
  }

  await openScreen("Learn");
  const lessons = page.getByRole("navigation", { name: "Lessons" }).getByRole("listitem").getByRole("button");
  for (let number = 0; number < (await lessons.count()); number++) {
    await lessons.nth(number).click();
    await check(`lesson ${number + 1}`);
  }
  const tabs = page.getByRole("navigation", { name: "Parts of the screen Learn" }).getByRole("button");
  await tabs.filter({ hasText: "Quiz" }).click();
  const question = page.locator("form").first();
  await question.locator("label").first().click();
  if (await question.getByRole("textbox").count()) await question.getByRole("textbox").fill("1");
  await question.getByRole("button", { name: "Answer" }).click();
  await question.getByText(/^(Correct|Incorrect)\./).waitFor();
  await check("quiz");
  await tabs.filter({ hasText: "Interview" }).click();
  await page.getByRole("button", { name: "Show the model answer" }).click();
  await check("interview");
  await tabs.filter({ hasText: "Exercises" }).click();
  const exercises = page.getByRole("navigation", { name: "Exercises" }).getByRole("button");
  for (let number = 1; number <= (await exercises.count()); number++) {
    await exercises.nth(number - 1).click();
    await page.getByText(`cutaway learn check ${number}`, { exact: false }).first().waitFor();
    await check(`exercise ${number}`);
  }
  assert.equal(await page.getByRole("button", { name: "Run", exact: true }).count(), 0);
}
