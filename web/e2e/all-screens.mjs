// Every screen, or those of facts.screens, of every model of facts.models (name → URL): no console message of any level, no failed request, no error on the page.
import assert from "node:assert/strict";

const SCREENS = ["Model", "Trace", "Edit", "Compare", "Attention", "Generate", "Training", "Size", "Check", "Learn"];

export async function run(page, url, facts) {
  const messages = [];
  page.on("console", (message) => messages.push(`${message.type()}: ${message.text()} (${message.location().url})`));
  page.on("pageerror", (error) => messages.push(`page error: ${error.message}`));
  page.on("response", (response) => response.status() >= 400 && messages.push(`HTTP ${response.status()}: ${response.url()} ${response.request().postData() ?? ""}`));
  page.on("requestfailed", (request) => {
    const reason = request.failure()?.errorText; // the page aborts requests whose result is no longer shown
    if (reason !== "net::ERR_ABORTED") messages.push(`${reason}: ${request.url()}`);
  });
  for (const [name, modelUrl] of Object.entries(facts.models)) {
    await page.goto(modelUrl);
    for (const screen of facts.screens ?? SCREENS) {
      await page.getByRole("navigation", { name: "Screens" }).getByRole("link", { name: screen, exact: true }).click();
      await waitUntilComplete(page, `${name}, ${screen}`);
      if (screen === "Learn") await visitLessons(page, name);
      if (screen === "Compare") await enterChangedText(page, `${name}, ${screen}`);
      if (screen === "Check") await runQuickChecks(page, name);
      await checkInput(page, name, screen, facts);
      assert.deepEqual(messages, [], `${name}, ${screen}`);
      if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/${name}-${screen}.png`, fullPage: true });
    }
  }
}

/** A model without examples and without a plausible change has an empty changed text; enter one. */
async function enterChangedText(page, place) {
  const changed = page.locator("#changed");
  if (await changed.inputValue()) return;
  const clean = await page.locator((await page.locator("#source").count()) ? "#source" : "#prompt").inputValue();
  await changed.fill(clean.replace("cat", "dog"));
  await page.getByRole("region", { name: "Activations" }).waitFor();
  await waitUntilComplete(page, place);
}

async function visitLessons(page, name) {
  const lessons = page.getByRole("navigation", { name: "Lessons" }).getByRole("listitem").getByRole("button");
  const count = await lessons.count();
  assert.ok(count > 0, `${name} has no lessons`);
  for (let number = 0; number < count; number++) {
    await lessons.nth(number).click();
    await waitUntilComplete(page, `${name}, lesson ${number + 1}`);
  }
  const tabs = page.getByRole("navigation", { name: "Parts of the screen Learn" }).getByRole("button");
  for (const tab of ["Exercises", "Quiz", "Interview", "Lessons"]) {
    await tabs.filter({ hasText: tab }).click();
    await waitUntilComplete(page, `${name}, ${tab}`);
  }
}

/** The quick checks pass on every model. */
async function runQuickChecks(page, name) {
  await page.getByRole("button", { name: /^Run the \d+ quick checks$/ }).click();
  const summary = await page.getByText(/^\d+ checks? passed, /).innerText();
  assert.match(summary, /^[1-9]\d* checks? passed, 0 failed, /, name);
}

/** Wait until no request is running and no status says that something is computed; no alert may be shown. */
async function waitUntilComplete(page, place) {
  await page.waitForLoadState("networkidle");
  await page.waitForFunction(() => document.querySelector("main h2") && ![...document.querySelectorAll("main [role=status]")].some((status) => status.textContent.includes("…")));
  const alerts = await page.locator("main [role=alert]").allInnerTexts();
  assert.deepEqual(alerts, [], place);
}

/** Default inputs: a target of an encoder-decoder, a selected mask of an encoder, the alignment on the screen Attention. */
async function checkInput(page, name, screen, facts) {
  const expected = facts.inputs[name] ?? {};
  const selected = page.getByRole("listbox", { name: "Tokens", exact: true }).getByRole("option", { selected: true });
  if (expected.target && ["Model", "Trace", "Generate", "Edit", "Compare", "Attention"].includes(screen)) assert.equal(await page.locator("#prompt").inputValue(), expected.target);
  if (expected.mask && !["Training", "Size", "Check"].includes(screen)) assert.equal(await selected.innerText(), expected.mask);
  if (expected.mask && screen === "Generate") await page.getByRole("heading", { name: "Mask 1" }).waitFor();
  if (expected.target && screen === "Attention") {
    assert.equal(await page.getByRole("group", { name: "Attention type" }).getByRole("button", { pressed: true }).innerText(), "Cross-attention");
    await page.getByText(/of the source tokens, .* has the largest weight for the target token/).waitFor();
  }
}
