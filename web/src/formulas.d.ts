declare module "virtual:formulas" {
  const drawn: Record<string, string>;
  export default drawn;
}
