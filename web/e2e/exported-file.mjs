// Exported page: the same view without a server, and an error message for results that it does not contain.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  await page.goto(`file://${facts.file}`);
  await page.getByRole("group", { name: "Block diagram" }).waitFor();
  assert.equal(await page.getByRole("combobox", { name: "Model" }).count(), 0);
  await page.locator('[data-box="prediction"] code').first().waitFor();
  await page.locator('[data-box="attn"]').click();
  await page.getByRole("button", { name: "Head 0" }).waitFor();
  await page.keyboard.press("2");
  const rows = page.getByRole("listbox", { name: "Residual stream from embedding to logits" }).getByRole("option");
  await page.getByText("logit lens unchanged from here").waitFor();
  assert.equal(await rows.count(), facts.points.length);
  const label = await rows.last().getAttribute("aria-label");
  assert.ok(label.includes(`logit lens ${facts.points.at(-1).top_token}`), label);
  await page.getByRole("button", { name: "pattern" }).or(page.getByRole("button", { name: "hidden" })).first().click();
  await page.locator(".formulas math").first().waitFor();
  await page.keyboard.press("4");
  await page.getByRole("heading", { name: "Attention pattern", exact: true }).waitFor();
  await page.keyboard.press("8");
  await page.getByRole("button", { name: /Attention scores: query times key/ }).click();
  await page.locator(".formulas math").first().waitFor();
  await page.getByRole("heading", { name: /Exercise 1/ }).or(page.getByRole("button", { name: "Answer" }).first()).first().waitFor();
  await page.keyboard.press("2");
  await page.getByRole("textbox", { name: "Text" }).fill("something else");
  await page.getByText(/this exported page contains only the results computed at export/).first().waitFor();
}
