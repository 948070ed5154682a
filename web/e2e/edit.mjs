// Edit: switches stand in the address, what is shown is what the server says, a bar chooses its token.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  // What Python says of the same change.
  await page.goto(`${url}#/edit?${new URLSearchParams({ text: facts.text, edits: facts.broken.edits })}`);
  await page.getByText(/top five that stay/).waitFor();
  assert.deepEqual(await page.locator(".verdict dd").allInnerTexts(), facts.broken.said);

  await page.goto(`${url}#/edit?`);
  await page.getByText("Nothing is broken yet").waitFor();
  const board = page.getByRole("grid", { name: "Switches" });

  const answered = page.waitForResponse((response) => response.url().endsWith("/api/query/edit_effect"));
  await board.getByRole("button", { name: "block 0: swap" }).click();
  await answered;
  await page.getByText("block 0: FFN before attention").waitFor();
  assert.match(decodeURIComponent(page.url()), /edits=blocks\.0:swap/);

  // By keys alone: one step right is the next switch, and Enter presses it.
  await board.getByRole("button", { name: "block 0: swap" }).focus();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("Enter");
  await page.getByText("block 0: no residual", { exact: true }).last().waitFor();
  assert.match(decodeURIComponent(page.url()), /edits=blocks\.0:no_residual/);

  await board.getByRole("button", { name: "block 1, head 1" }).click();
  await board.getByRole("button", { name: "the whole: no final norm" }).click();
  await page.getByText(/top five that stay/).waitFor();
  const there = page.url();
  const loss = page.locator("dl div", { hasText: "loss on this text" }).locator("dd");
  const said = await loss.innerText();
  assert.match(said, /→/);

  // A link leads to the same picture.
  await page.goto("about:blank");
  await page.goto(there);
  await page.getByText(/top five that stay/).waitFor();
  assert.equal(await loss.innerText(), said);
  assert.equal(await board.getByRole("button", { name: "block 1, head 1" }).getAttribute("aria-pressed"), "true");

  const strip = page.getByRole("slider", { name: /KL by token/ });
  await strip.waitFor();
  await strip.click({ position: { x: 4, y: 60 } });
  assert.match(page.url(), /[?&]position=0/);
  await strip.press("ArrowRight");
  assert.match(page.url(), /[?&]position=1/);

  await page.getByRole("button", { name: "Reset" }).click();
  await page.getByText("Nothing is broken yet").waitFor();
  assert.doesNotMatch(page.url(), /edits/);

  // What is surgery and what is training is told apart.
  await page.getByText("surgery on trained weights").first().waitFor();
  await page.getByText("trained this way").first().waitFor();

  // What is broken stays so on the other screens, until it is reset.
  await page.goto(`${url}#/trace?edits=blocks.1:skip`);
  await page.getByText("block 1: skipped").waitFor();
  await page.getByText("prediction fixed here").waitFor();
  const rows = page.getByRole("listbox", { name: "The stream from embedding to answer" }).getByRole("option");
  const fewer = await rows.count();
  await page.getByRole("button", { name: "Reset" }).click();
  await page.waitForFunction((count) => document.querySelectorAll('[aria-label="The stream from embedding to answer"] [role="option"]').length > count, fewer);
}
