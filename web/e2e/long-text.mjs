// 512 tokens: every screen draws them, with a number of elements that does not grow with the square of the length.
// How long the page is busy depends on the machine: the longest tasks are printed, not tested.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  await page.addInitScript(() => {
    window.long = [];
    new PerformanceObserver((list) => list.getEntries().forEach((entry) => window.long.push(Math.round(entry.duration)))).observe({ type: "longtask", buffered: true });
  });
  await page.goto(`${url}#/trace?text=${encodeURIComponent(facts.long)}`);
  const strip = page.getByRole("listbox", { name: "Tokens" });
  await page.waitForFunction((count) => document.querySelectorAll('[aria-label="Tokens"] [role="option"]').length === count, facts.long_tokens);
  const rows = page.getByRole("listbox", { name: "The stream from embedding to answer" }).getByRole("option");
  await rows.first().waitFor();
  for (const at of [0, 100, 300, facts.long_tokens - 1]) {
    await strip.getByRole("option").nth(at).click();
    await page.waitForFunction((number) => location.hash.includes(`position=${number}`), at);
    await page.waitForLoadState("networkidle");
  }
  for (const screen of ["attention", "edit", "generate", "trace"]) {
    await page.evaluate((name) => { location.hash = location.hash.replace(/^#\/\w+/, `#/${name}`); }, screen);
    await page.waitForTimeout(1500);
    await page.waitForLoadState("networkidle");
    if (screen === "generate") await page.getByText("Shorten the text, and it writes on").waitFor();
    const elements = await page.evaluate(() => document.querySelectorAll("*").length);
    assert.ok(elements < 5 * facts.long_tokens, `${screen}: ${elements} elements for ${facts.long_tokens} tokens`);
    const long = await page.evaluate(() => window.long.splice(0));
    console.log(`${screen}: ${elements} elements, longest task ${Math.max(0, ...long)} ms`);
  }
}
