// Size: sliders change the values, presets are compared, an invalid configuration shows an error message.
import assert from "node:assert/strict";

export async function run(page, url) {
  await page.goto(`${url}#/size?size.base=gpt2`);
  await page.getByText("gpt2: 124,439,808").waitFor();

  const layers = page.getByRole("slider", { name: "layers" });
  await layers.focus();
  await page.keyboard.press("ArrowRight");
  await page.getByText("gpt2, modified: 131,527,680").waitFor(); // a block of GPT-2 has 7,087,872 parameters
  assert.match(page.url(), /size\.layers=13/);

  await page.getByRole("spinbutton", { name: "heads", exact: true }).fill("7");
  await page.keyboard.press("Tab");
  await page.getByText(/7 heads do not divide d_model 768/).waitFor();
  await page.getByRole("button", { name: "Reset to gpt2" }).click();
  await page.getByText("gpt2: 124,439,808").waitFor();

  await page.getByRole("combobox", { name: /^Compare with/ }).selectOption("llama-3-8b");
  await page.getByText("llama-3-8b: 8,030,261,248").waitFor();
  await page.getByRole("combobox", { name: /^Device/ }).selectOption("t4");
  await page.getByText("✗ does not fit").waitFor();
  await page.getByText("✓ fits").waitFor();
  await page.waitForLoadState("networkidle"); // the navigation aborts no query
  const link = page.url();
  await page.goto("about:blank");
  await page.goto(link);
  await page.getByText("llama-3-8b: 8,030,261,248").waitFor();
  assert.equal(await page.getByRole("img", { name: /llama-3-8b decode/ }).count(), 1);
  await page.getByLabel("training", { exact: true }).check();
  await page.getByText("Training memory").waitFor();
  assert.match(page.url(), /size\.mode=train/);
}
