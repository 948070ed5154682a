declare module "virtual:formulas" {
  const mathmlByName: Record<string, string>;
  export default mathmlByName;
}
