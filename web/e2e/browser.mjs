// Path and arguments of Chromium (Debian's by default), without background network requests.
export const EXECUTABLE = process.env.CHROMIUM ?? "/usr/bin/chromium";
export const ARGUMENTS = [
  "--no-sandbox",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-default-apps",
  "--disable-domain-reliability",
  "--disable-sync",
  "--metrics-recording-only",
  "--no-first-run",
  "--no-pings",
  "--safebrowsing-disable-auto-update",
  "--disable-features=OptimizationHints,MediaRouter,Translate,AutofillServerCommunication,CertificateTransparencyComponentUpdater",
];
