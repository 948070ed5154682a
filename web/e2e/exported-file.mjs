// The page as a file: the same picture without a server, and a plain word about what it does not hold.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  await page.goto(`file://${facts.file}`);
  const rows = page.getByRole("listbox", { name: "The stream from embedding to answer" }).getByRole("option");
  await page.getByText("prediction fixed here").waitFor();
  assert.equal(await rows.count(), facts.points.length);
  const said = await rows.last().getAttribute("aria-label");
  assert.ok(said.includes(`would say ${facts.points.at(-1).says}`), said);
  await page.getByRole("button", { name: "weights" }).or(page.getByRole("button", { name: "hidden" })).first().click();
  await page.locator(".formulas math").first().waitFor();
  await page.keyboard.press("3");
  await page.getByRole("heading", { name: "Who looks at whom" }).waitFor();
  await page.keyboard.press("7");
  await page.getByRole("button", { name: /Scores: query meets key/ }).click();
  await page.locator(".formulas math").first().waitFor();
  await page.getByRole("heading", { name: /Exercise 1/ }).or(page.getByRole("button", { name: "Answer" }).first()).first().waitFor();
  await page.keyboard.press("1");
  await page.getByRole("textbox", { name: "Text" }).fill("something else");
  await page.getByText(/this page is a file, and holds what was asked when it was made/).first().waitFor();
}
