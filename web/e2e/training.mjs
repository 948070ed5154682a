// Training: commands without a run, gradient measurements, and runs of facts.models: one before its first step, one that trains.
import { AxeBuilder } from "@axe-core/playwright";
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  await checkGradients(page, url);
  await checkUnstartedRun(page, facts.models.unstarted);
  await checkLiveRun(page, facts.models.live, facts);
}

async function checkGradients(page, url) {
  await page.goto(`${url}#/gradients?depths=6.12&num_seeds=2&stack_form=encoder`);
  await page.getByText("cutaway train python-stdlib --out runs/first").waitFor();
  assert.match(page.url(), /#\/training\?depths=6\.12/); // the former name of the screen
  await page.getByText("12 models measured.").waitFor();
  const figures = page.getByRole("img", { name: /pre-norm: .* at the first block/ });
  assert.equal(await figures.count(), 2);
  await page.getByText(/Gradient norm after the first of 12 blocks relative to the last/).waitFor();

  await page.getByText("The study at this setting").click();
  await page.getByText(/^post-norm, 12 blocks: the gradient norm after the first block/).waitFor();

  await page.getByRole("button", { name: "6", exact: true }).click();
  assert.match(page.url(), /depths=12(&|$)/);
  await page.getByText("6 models measured.").waitFor();
  await page.getByLabel("Activation").selectOption("gelu");
  assert.match(page.url(), /stack_activation=gelu/);

  await page.getByRole("button", { name: "48", exact: true }).click();
  await page.getByRole("button", { name: "Stop" }).click();
  await page.getByText("Stopped.").waitFor();

  await page.getByText(/The gradient norm after the first block is \S+ times the gradient norm after the last block\./).waitFor();
  assert.equal(await page.getByRole("img", { name: /By block: embed/ }).count(), 1);

  // The link opens Edit at the trained variants, also in a new tab; the parameter is removed from the URL.
  const link = page.getByRole("link", { name: "Edit, Trained variants" });
  const address = await link.getAttribute("href");
  await page.waitForLoadState("networkidle"); // the navigation aborts no query
  await link.click();
  await checkVariantsInView(page);
  await page.goto("about:blank");
  await page.goto(`${url}${address}`);
  await checkVariantsInView(page);
}

async function checkVariantsInView(page) {
  await page.waitForFunction(() => document.activeElement?.textContent.startsWith("Trained variants"));
  await page.waitForLoadState("networkidle");
  const top = await page.evaluate(() => document.activeElement.getBoundingClientRect().top);
  assert.ok(top >= 0 && top < 300, `the heading is at ${top} px`);
  assert.match(page.url(), /#\/edit/);
  assert.doesNotMatch(page.url(), /edit_section/);
}

async function checkUnstartedRun(page, url) {
  await page.goto(`${url}#/training`);
  const run = page.getByRole("region", { name: "Training run" });
  await run.getByText(/stopped, step 0 of 6/).waitFor();
  await run.getByText(/cutaway train --resume .*unstarted/).waitFor();
  await run.getByText("No training step has been logged yet.").waitFor();
  await page.getByText("The run has no checkpoint yet; the first one is written at step 1.").waitFor();
}

async function checkLiveRun(page, url, facts) {
  await page.goto(`${url}#/training`);
  const run = page.getByRole("region", { name: "Training run" });
  await run.getByText(/: training, step \d+ of 40, about .* left/).waitFor();
  await run.getByText(/: finished, step 40 of 40/).waitFor(); // without a reload
  for (const name of [/^Training loss from/, /^Gradient norm before clipping from/, /^Learning rate from/, /^Throughput from/, /^Update ratio at step 40: embed/]) await run.getByRole("img", { name }).waitFor();
  await run.getByText("step 10", { exact: true }).waitFor();

  const checkpoints = page.getByRole("region", { name: "Checkpoints" });
  const slider = checkpoints.getByRole("slider");
  await checkpoints.getByText(new RegExp(`${facts.steps.length} of ${facts.steps.length} checkpoints computed`)).waitFor();
  await slider.focus();
  for (let index = facts.steps.length - 1; index >= 0; index--) {
    await checkpoints.getByText(`Attention patterns at step ${facts.steps[index]}`).waitFor();
    await checkpoints.getByText(`Loss on this text: ${facts.losses[index]} nats per token.`).waitFor();
    if (index) await page.keyboard.press("ArrowLeft");
  }
  assert.match(page.url(), /checkpoint=0/);
  await checkpoints.getByRole("group", { name: "Heads of block 1" }).getByRole("button", { name: "Head 1" }).click();
  assert.match(page.url(), /run_head=blocks\.1\.attn%3A1/);
  assert.equal(await checkpoints.getByRole("img", { name: /^(previous token|induction|first token) score of 4 heads/ }).count(), 3);
  await checkpoints.getByText("List of the checkpoints").click();
  assert.equal(await checkpoints.getByRole("row").count(), facts.steps.length + 1);

  await checkPresentation(page);
  await page.getByText("The open model has the weights of step 0.").waitFor(); // opened before the first step
  await slider.focus();
  await page.keyboard.press("ArrowRight");
  await checkpoints.getByRole("button", { name: "Open this checkpoint" }).click();
  await page.getByText("The open model has the weights of step 1.").waitFor();
  await checkpoints.getByRole("button", { name: "This checkpoint is open" }).waitFor();
  assert.equal(await page.getByLabel("Model", { exact: true }).evaluate((select) => select.selectedOptions[0].textContent), "step 1");
  await page.getByRole("link", { name: "Trace", exact: true }).click(); // the checkpoint is open on all screens
  await page.waitForFunction(() => document.title === "Trace · live at step 1 · cutaway");
}

/** No accessibility violation in both themes, no horizontal overflow. */
async function checkPresentation(page) {
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme });
    const { violations } = await new AxeBuilder({ page }).analyze();
    assert.deepEqual(violations.map(({ id, nodes }) => `${scheme}: ${id}: ${nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")}`), []);
    if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/training-${scheme}.png`, fullPage: true });
  }
  for (const width of [390, 1440, 1920, 1280]) {
    await page.setViewportSize({ width, height: 900 });
    await page.waitForTimeout(200);
    const [scrollWidth, clientWidth] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
    assert.ok(scrollWidth <= clientWidth, `the screen is ${scrollWidth} px wide at ${width}`);
    if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/training-${width}.png`, fullPage: true });
  }
}
