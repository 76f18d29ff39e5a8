/* inside.c - the fuzzers that have the implementation in them, all in one file with it: to replay
   their inputs it is compiled once. */

#define LLVMFuzzerTestOneInput fuzz_meet
#include "fuzz_meet.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_npy
#include "fuzz_npy.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_save
#include "fuzz_save.c"
