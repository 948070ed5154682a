/* Entry points: arguments as a kernel launch takes them, by address. */

extern "C" const char *emulate_int8_linear(int grid_x, int grid_y, int threads, long shared_bytes, void **arguments) {
    static void **args;
    args = arguments;
    return emulator::run_blocks(grid_x, grid_y, threads, shared_bytes, [] {
        int8_linear(*(Weight *)args[0], *(Input *)args[1], *(void **)args[2], *(const void **)args[3]);
    });
}
extern "C" const char *emulate_quantize_rows(int grid_x, int grid_y, int threads, long shared_bytes, void **arguments) {
    static void **args;
    args = arguments;
    return emulator::run_blocks(grid_x, grid_y, threads, shared_bytes, [] {
        quantize_rows(*(Input *)args[0], *(uint4 **)args[1], *(float **)args[2], *(u32 **)args[3], *(int *)args[4]);
    });
}
extern "C" const char *emulate_dequantize_rows(int grid_x, int grid_y, int threads, long shared_bytes, void **arguments) {
    static void **args;
    args = arguments;
    return emulator::run_blocks(grid_x, grid_y, threads, shared_bytes, [] {
        dequantize_rows(*(Weight *)args[0], *(const long long **)args[1], *(int *)args[2], *(int *)args[3], *(void **)args[4]);
    });
}
