// Save a figure with the button `name` and return the download. The keyboard is used: a result that arrives between mousedown and
// mouseup moves the button, and the browser then fires no click.
export async function saveFigure(page, name) {
  const download = page.waitForEvent("download");
  await page.getByRole("button", { name }).press("Enter");
  return download;
}
