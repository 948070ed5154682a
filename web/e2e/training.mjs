// Gradients: models are measured one after another, can be stopped, and are part of the URL; the study is quoted.
import assert from "node:assert/strict";

export async function run(page, url) {
  await page.goto(`${url}#/gradients?depths=6.12&num_seeds=2&stack_form=encoder`);
  await page.getByText("12 models measured.").waitFor();
  const figures = page.getByRole("img", { name: /pre-norm: .* at the first block/ });
  assert.equal(await figures.count(), 2);
  await page.getByText(/Gradient norm after the first of 12 blocks relative to the last/).waitFor();

  await page.getByText(/^post-norm, 12 blocks: the gradient norm after the first block/).waitFor();

  await page.getByRole("button", { name: "6", exact: true }).click();
  assert.match(page.url(), /depths=12(&|$)/);
  await page.getByText("6 models measured.").waitFor();
  await page.getByLabel("Activation").selectOption("gelu");
  assert.match(page.url(), /stack_activation=gelu/);

  await page.getByRole("button", { name: "48", exact: true }).click();
  await page.getByRole("button", { name: "Stop" }).click();
  await page.getByText("Stopped.").waitFor();

  await page.getByText(/The gradient norm after the first block is/).waitFor();
  assert.equal(await page.getByRole("img", { name: /By block: embed/ }).count(), 1);
}
