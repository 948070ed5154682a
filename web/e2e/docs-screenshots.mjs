// Screenshots of every screen for the documentation: node e2e/docs-screenshots.mjs URL FOLDER [SCREEN…]
// scripts/take_screenshots.py starts a server and calls this.
import { chromium } from "playwright-core";
import { ARGUMENTS, EXECUTABLE } from "./browser.mjs";

const [url, folder, ...screens] = process.argv.slice(2);
const VIEWS = {
  model: ["/model?", "light"],
  trace: ["/trace?", "light"],
  edit: ["/edit?edits=blocks.3:swap", "light"],
  compare: [`/compare?${new URLSearchParams({ text: "The girl was sad because", changed: "The boy was sad because", patches: "blocks.3.resid_pre@1" })}`, "light"],
  attention: ["/attention?", "dark"],
  generate: ["/generate?", "light"],
  training: ["/training?run_head=blocks.0.attn:4", "light"],
  size: ["/size?size.base=llama-3-8b", "light"],
  check: ["/check?", "light"],
  learn: ["/learn?step=mask", "light"],
};
const browser = await chromium.launch({ executablePath: EXECUTABLE, args: ARGUMENTS });
for (const [name, [fragment, colorScheme]] of Object.entries(VIEWS)) {
  if (screens.length && !screens.includes(name)) continue;
  const page = await browser.newPage({ viewport: { width: 1200, height: 860 }, colorScheme });
  await page.addInitScript(() => localStorage.setItem("cutaway.tour", "seen"));
  await page.goto(`${url}#${fragment}`);
  await page.waitForLoadState("networkidle");
  await page.waitForTimeout(1500);
  if (name === "generate") for (let step = 0; step < 12; step++) await page.getByRole("button", { name: "Step", exact: true }).click();
  if (name === "check") {
    await page.getByRole("button", { name: /^Run all/ }).click();
    await page.getByText(/^\d+ checks passed, /).waitFor();
    await page.locator("details").filter({ hasText: "no logit changes with a later token (7 positions)" }).first().locator("summary").click();
  }
  await page.waitForLoadState("networkidle");
  await page.waitForTimeout(2500);
  if (name === "compare") await page.getByRole("region", { name: "Residual stream", exact: true }).evaluate((region) => region.scrollIntoView());
  if (name === "training") await page.getByRole("heading", { name: "Checkpoints" }).evaluateAll((headings) => headings[0]?.scrollIntoView());
  await page.screenshot({ path: `${folder}/${name}.png` });
  await page.close();
}
await browser.close();
