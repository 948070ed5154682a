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
  await checkMemoryColors(page, url);

  // Reset: batch size, mode and device, too.
  await page.goto(`${url}#/size?size.batch=8&size.mode=train&size.hardware=t4`);
  await page.getByText("Training memory").waitFor();
  await page.getByRole("button", { name: "Reset to this model" }).click();
  await page.getByText("Inference memory").waitFor();
  assert.doesNotMatch(page.url(), /size\./);
  assert.ok(await page.getByRole("button", { name: "Reset to this model" }).isDisabled());
}

/** Every component of the memory has its own color, the same in the bar and in the legend, in both themes. */
async function checkMemoryColors(page, url) {
  const cases = [["train", "gradients", /^Gradients: those that are allocated at the peak\./], ["infer", "KV cache", /^cuBLAS workspace: .* 64 MiB for a model of any size/]];
  for (const [mode, component, explanation] of cases) {
    await page.goto(`${url}#/size?size.mode=${mode}&size.batch=8`);
    const panel = page.locator("section", { has: page.getByRole("heading", { name: mode === "train" ? "Training memory" : "Inference memory" }) });
    await panel.locator("li", { hasText: component }).waitFor();
    await panel.getByText(explanation).waitFor();
    for (const colorScheme of ["dark", "light"]) {
      await page.emulateMedia({ colorScheme });
      const bars = await panel.locator("svg rect").evaluateAll((elements) => elements.map((element) => getComputedStyle(element).fill));
      const legend = await panel.locator("li i").evaluateAll((elements) => elements.map((element) => getComputedStyle(element).backgroundColor));
      assert.ok(bars.length >= 5, `${bars.length} components`);
      assert.equal(new Set(bars).size, bars.length, bars.join(" "));
      assert.deepEqual(bars, legend);
    }
  }
}
