// Gradients: stacks are measured one after another, can be stopped, and are part of the URL.
import assert from "node:assert/strict";

export async function run(page, url) {
  await page.goto(`${url}#/gradients?depths=4.8&num_seeds=2&stack_d_model=32`);
  await page.getByText("8 stacks measured.").waitFor();
  const figures = page.getByRole("img", { name: /pre-norm: .* at the first block/ });
  assert.equal(await figures.count(), 2);
  await page.getByText(/Gradient norm at the first of 8 blocks relative to the last/).waitFor();

  await page.getByRole("button", { name: "4", exact: true }).click();
  assert.match(page.url(), /depths=8(&|$)/);
  await page.getByText("4 stacks measured.").waitFor();

  await page.getByRole("button", { name: "48", exact: true }).click();
  await page.getByRole("button", { name: "Stop" }).click();
  await page.getByText("Stopped.").waitFor();

  await page.getByText(/The gradient norm after the first block is/).waitFor();
  assert.equal(await page.getByRole("img", { name: /By block: embed/ }).count(), 1);
}
