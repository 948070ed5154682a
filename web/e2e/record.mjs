// Frames of a short recording of the page: node e2e/record.mjs URL FOLDER. FOLDER gets 000.png, 001.png … and durations.json (milliseconds).
import { writeFileSync } from "node:fs";
import { chromium } from "playwright-core";
import { ARGUMENTS, EXECUTABLE } from "./browser.mjs";

const [url, folder] = process.argv.slice(2);
const VIEWPORT = { width: 1000, height: 720 };
const browser = await chromium.launch({ executablePath: EXECUTABLE, args: ARGUMENTS });
const page = await browser.newPage({ viewport: VIEWPORT, colorScheme: "light" });
page.setDefaultTimeout(60_000);
const durations = [];

/** Take a frame that is shown for some milliseconds. */
async function frame(milliseconds) {
  await page.screenshot({ path: `${folder}/${String(durations.length).padStart(3, "0")}.png` });
  durations.push(milliseconds);
}

/** Show a caption at the bottom of the page. */
async function caption(text) {
  await page.evaluate((content) => {
    const element = document.querySelector("#caption") ?? document.body.appendChild(Object.assign(document.createElement("div"), { id: "caption" }));
    Object.assign(element.style, { position: "fixed", bottom: "0", left: "0", right: "0", padding: "10px 18px", background: "#1c2430", color: "white", font: "600 17px sans-serif", zIndex: "1000" });
    element.textContent = content;
  }, text);
}

async function open(screen, text) {
  await page.getByRole("navigation", { name: "Screens" }).getByRole("link", { name: screen, exact: true }).click();
  await page.evaluate(() => scrollTo(0, 0));
  await caption(text);
  await settle();
}

async function settle() {
  await page.waitForLoadState("networkidle");
  await page.waitForFunction(() => ![...document.querySelectorAll("main [role=status]")].some((status) => status.textContent.includes("…")));
  await page.waitForTimeout(300);
}

/** Scroll in steps until the element is near the top. */
async function scrollTo(locator, steps = 4) {
  const top = await locator.evaluate((element) => element.getBoundingClientRect().top - 12);
  for (let step = 0; step < steps; step++) {
    await page.evaluate((distance) => scrollBy(0, distance), top / steps);
    await frame(110);
  }
}

await page.goto(`${url}#/model?text=${encodeURIComponent("The cat sat on the")}`);
await page.getByRole("button", { name: "Skip" }).click();
await caption("The open model as a block diagram, with its real sizes");
await settle();
await frame(2600);
await page.getByRole("button", { name: /^Attention.*parameters/ }).first().click();
await caption("A click on a box explains it");
await settle();
await frame(2600);

await open("Trace", "Trace: the residual stream of a token, and what the prediction depends on");
await frame(3600);
await page.getByRole("listbox", { name: "Residual stream from embedding to logits" }).getByRole("option").nth(7).click();
await caption("Every activation: what it is, its values, and the code that prints it");
await settle();
await frame(2600);
await scrollTo(page.getByRole("region", { name: "What the prediction depends on" }));
await caption("Measured effects: attention knockout by token, ablation by component");
await frame(4200);

await open("Attention", "Attention: all heads; a click enlarges one");
await frame(2600);
await scrollTo(page.getByRole("region", { name: "Worked example" }));
await caption("One attention weight worked out: q·k, scale, mask, softmax, weighted values");
await frame(4500);

await open("Edit", "Edit: remove a component. What happens to the loss?");
await page.getByRole("button", { name: "model: no mask" }).click();
await settle();
await page.getByRole("button", { name: "it falls", exact: true }).waitFor();
await scrollTo(page.getByRole("region", { name: "Experiment", exact: true }));
await frame(2400);
await page.getByRole("button", { name: "it falls", exact: true }).click();
await page.getByText(/The loss rises/).waitFor();
await caption("Predict first; then the loss with an interval, and both continuations");
await frame(4500);
await page.getByRole("button", { name: "ALiBi" }).click();
await scrollTo(page.getByRole("region", { name: "Trained variants" }));
await page.getByRole("button", { name: "within 0.02 nats" }).click();
await page.getByText(/Greedy continuation, ALiBi/).waitFor();
await caption("Models trained with another norm, placement or position method");
await frame(4500);

await page.getByRole("button", { name: "Reset" }).click();
await open("Compare", "Compare: two texts, and where their runs differ");
await page.getByRole("button", { name: "Pronoun", exact: true }).click();
await settle();
await frame(3000);
await scrollTo(page.getByRole("region", { name: "Residual stream", exact: true }));
await caption("Activation patching: which activation carries the difference?");
await frame(4000);

await open("Generate", "Generate: token by token, with the KV cache");
for (let step = 0; step < 10; step++) {
  await page.getByRole("button", { name: "Step", exact: true }).click();
  await page.waitForTimeout(150);
  await frame(step === 9 ? 1800 : 320);
}

await open("Check", "Check: is the implementation correct?");
await page.getByRole("button", { name: /^Run all/ }).click();
await page.getByText(/^\d+ checks passed, /).waitFor();
await frame(3500);

await open("Learn", "Learn: lessons, exercises, quiz and interview questions");
await page.getByRole("button", { name: /^Exercises/ }).click();
await settle();
await frame(3500);
await open("Size", "Size: parameters, FLOPs, memory and speed of a configuration");
await frame(2800);
writeFileSync(`${folder}/durations.json`, JSON.stringify(durations));
console.log(`${durations.length} frames, ${durations.reduce((sum, value) => sum + value, 0) / 1000} s`);
await browser.close();
