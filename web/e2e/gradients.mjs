// Gradients: stacks come one after another, can be given up, and stand in the address.
import assert from "node:assert/strict";

export async function run(page, url) {
  await page.goto(`${url}#/gradients?depths=4.8&num_seeds=2&stack_d_model=32`);
  await page.getByText("8 stacks, computed just now.").waitFor();
  const picture = page.getByRole("img", { name: /pre-norm: .* at the first block/ });
  assert.equal(await picture.count(), 2);
  await page.getByText(/Through 8 blocks/).waitFor();

  await page.getByRole("button", { name: "4", exact: true }).click();
  assert.match(page.url(), /depths=8(&|$)/);
  await page.getByText("4 stacks, computed just now.").waitFor();

  await page.getByRole("button", { name: "48", exact: true }).click();
  await page.getByRole("button", { name: "Stop" }).click();
  await page.getByText("Stopped.").waitFor();

  await page.getByText(/After the first block the gradient is/).waitFor();
  assert.equal(await page.getByRole("img", { name: /By depth: embed/ }).count(), 1);
}
