// Check: nothing runs by itself; all checks run on request, each with a row; the rows open with figures; a run can be canceled.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  const queries = [];
  page.on("request", (request) => queries.push(request.url().split("/").at(-1)));
  await page.goto(`${url}#/check`);
  await page.getByRole("button", { name: /^Run all \d+ checks$/ }).waitFor();
  assert.ok(!queries.includes("run_check"), "the checks started without a request");
  const rows = page.locator("details");
  assert.equal(await rows.count(), facts.checks.length);
  assert.equal(await page.locator("main select").first().inputValue(), "60");

  // A canceled run says so.
  await page.getByRole("button", { name: /^Run all/ }).click();
  await page.getByRole("progressbar", { name: "Checks finished" }).waitFor();
  await page.getByText(/^[1-9]\d* of \d+ checks: /).waitFor();
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.getByText("Canceled; the other checks did not run.").waitFor();

  // Quick checks, and then all checks, with the verdicts of the library.
  await page.getByRole("button", { name: /^Run the \d+ quick checks$/ }).click();
  await page.getByText(/^\d+ checks passed, 0 failed, .*; \d+ s\.$/).waitFor();
  await page.getByLabel("start no check after").selectOption("240");
  await page.getByRole("button", { name: /^Run all/ }).click();
  await page.getByText(/^\d+ of \d+ checks: /).waitFor();
  await page.getByText(/^\d+ checks passed, 0 failed, .*; \d+ s\.$/).waitFor();
  const shown = Object.fromEntries(await rows.evaluateAll((all) => all.map((row) => [row.querySelector(".title").firstChild.textContent.trim(), row.querySelector(".verdict").textContent])));
  for (const { title, verdict } of facts.checks) assert.equal(shown[title], { pass: "passed", fail: "failed", warn: "warning", skip: "does not apply" }[verdict], title);

  // What the result means, and reasons in words instead of names of arguments.
  await page.getByText(/^No failure was found by these checks\. The logits were not compared with another implementation/).waitFor();
  await rows.filter({ hasText: "a loss function was not given" }).first().waitFor();
  assert.equal(await page.locator("summary .message", { hasText: /needs (loss|reference_logits|window)|\(1 positions\)/ }).count(), 0);

  // Opened rows show what is compared and a figure of the measured values.
  const row = (title) => rows.filter({ has: page.locator(".title", { hasText: new RegExp(`^${title} passed`) }) });
  await row("Causality").locator("summary").click();
  await row("Causality").getByRole("img", { name: /^Largest change of a logit/ }).waitFor();
  await row("KV cache decode").locator("summary").click();
  await row("KV cache decode").getByRole("img", { name: /^Logits with KV cache/ }).waitFor();
  await row("KV cache decode").getByText("cutaway check tiny-english --only cache-decode --verbose").waitFor();
  if (process.env.SCREENSHOTS) {
    for (const [width, scheme] of [[1280, "light"], [1280, "dark"], [390, "light"]]) {
      await page.setViewportSize({ width, height: 900 });
      await page.emulateMedia({ colorScheme: scheme });
      await page.waitForTimeout(300);
      await page.screenshot({ path: `${process.env.SCREENSHOTS}/check-${width}-${scheme}.png`, fullPage: true });
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= document.documentElement.clientWidth), `overflow at ${width}`);
    }
    await page.setViewportSize({ width: 1280, height: 900 });
  }

  // The findings stay when another screen is shown.
  await page.getByRole("link", { name: "Size", exact: true }).click();
  await page.getByRole("link", { name: "Check", exact: true }).click();
  await page.getByText(/^\d+ checks passed, 0 failed/).waitFor();
}
