/* replay.c - the main() of a fuzzer without libFuzzer: runs it over the files that are named. */

#include "fuzz.h"

int main(int count, char **files)
{
    static uint8_t data[1 << 20];
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(files[i], "rb");
        if (file == NULL) {
            fprintf(stderr, "%s: cannot be opened\n", files[i]);
            return 1;
        }
        size_t bytes = fread(data, 1, sizeof(data), file);
        fclose(file);
        /* A copy of exactly that size: what reads past its end is seen. */
        uint8_t *input = malloc(bytes ? bytes : 1);
        FUZZ_CHECK(input != NULL);
        memcpy(input, data, bytes);
        LLVMFuzzerTestOneInput(input, bytes);
        free(input);
    }
    printf("%d inputs\n", count - 1);
    return 0;
}
