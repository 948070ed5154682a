// Compare with a model whose patching map takes long: it is measured on request, row by row, and can be canceled.
import assert from "node:assert/strict";

export async function run(page, url) {
  await page.goto(`${url}#/compare?`);
  const panel = page.getByRole("region", { name: "Activation patching" });
  await panel.getByText("The map takes a while for this model and text").waitFor();
  const measure = panel.getByRole("button", { name: "Measure" });
  await measure.click();
  await panel.getByText(/Patching layer [2-6] of 7/).waitFor();
  await panel.getByRole("img").waitFor(); // the rows measured so far
  await panel.getByRole("button", { name: "Cancel" }).click();
  await panel.getByText(/Canceled after [1-6] of 7 layers/).waitFor();
  await measure.click();
  await panel.getByRole("status").waitFor();
  await panel.getByRole("status").waitFor({ state: "detached" });
  assert.equal(await measure.count(), 0);
}
