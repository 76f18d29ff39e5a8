/* load.c - batches from a file: a loader whose threads read pictures and their classes.

   Without arguments it writes two small files itself, in the form of MNIST's, and reads these. Two
   threads read, straight into the batches; the last batch of an epoch is shorter. Half-way through
   the second epoch the place is kept, and another loader goes on from there.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 -O2 examples/load.c dp.o -o load -lpthread -lm
   Run:   ./load [train-images-idx3-ubyte train-labels-idx1-ubyte]
   Prints:
   1000 pictures of 28 x 28, 16 batches an epoch
   epoch 0: 1000 samples in 16 batches, the last one has 40
   epoch 1: on from batch 8
   epoch 1: 488 samples in 8 batches, the last one has 40 */

#include "../dp_data.h"
#include <stdio.h>
#include <stdlib.h>

enum { SIDE = 28, MADE = 1000, BATCH = 64 };

typedef struct set {
    dp_idx *images, *labels;
} set;

/* On several threads at once. */
static dp_status read_sample(dp_sample *sample, void *user)
{
    const set *s = user;
    DP_TRY(dp_idx_row(s->images, sample->index, sample->rows[0]));
    return dp_idx_row(s->labels, sample->index, sample->rows[1]);
}

/* Files as MNIST's, of squares that grow with their class. */
static void make_files(const char *images, const char *labels)
{
    FILE *image_file = fopen(images, "wb"), *label_file = fopen(labels, "wb");
    if (image_file == NULL || label_file == NULL)
        exit(1);
    fwrite("\0\0\x08\x03\0\0\x03\xe8\0\0\0\x1c\0\0\0\x1c", 1, 16, image_file);
    fwrite("\0\0\x08\x01\0\0\x03\xe8", 1, 8, label_file);
    for (int i = 0; i < MADE; i++) {
        fputc(i % 10, label_file);
        for (int at = 0; at < SIDE * SIDE; at++)
            fputc(at / SIDE <= i % 10 * 2 && at % SIDE <= i % 10 * 2 ? 255 : 0, image_file);
    }
    fclose(image_file);
    fclose(label_file);
}

static dp_loader *new_loader(dp_ctx *ctx, set *s)
{
    dp_idx_info images, labels;
    DP_CHECK(dp_idx_info_get(s->images, &images));
    DP_CHECK(dp_idx_info_get(s->labels, &labels));
    if (images.ndim != 3 || labels.ndim != 1 || images.shape[0] != labels.shape[0]) {
        fprintf(stderr, "these are not pictures and a label for each\n");
        exit(1);
    }
    const dp_field fields[] = {{"image", images.dtype, 2, {images.shape[1], images.shape[2]}},
                               {"label", labels.dtype, 0, {0}}};
    dp_loader *loader;
    DP_CHECK(dp_loader_create(ctx,
                              &(dp_loader_config){.sampler = {.count = images.shape[0]},
                                                  .batch = BATCH,
                                                  .read = read_sample,
                                                  .user = s,
                                                  .fields = fields,
                                                  .field_count = 2,
                                                  .worker_count = 2},
                              &loader));
    return loader;
}

/* What is left of the epoch, or so many batches of it. */
static void rest_of_epoch(dp_ctx *ctx, dp_loader *loader, int most)
{
    int64_t samples = 0, batches = 0, last = 0;
    for (; batches < most; batches++) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_batch batch;
        DP_CHECK(dp_loader_next(loader, step, &batch));
        /* here: dp_train_step(par, step, batch.value, optim, &log) */
        dp_scope_end(step);
        if (batch.ended) {
            printf("epoch %d: %d samples in %d batches, the last one has %d\n", (int)batch.epoch,
                   (int)samples, (int)batches, (int)last);
            return;
        }
        samples += batch.count;
        last = batch.count;
    }
}

int main(int argc, char **argv)
{
    const char *images = argc == 3 ? argv[1] : "load-images",
               *labels = argc == 3 ? argv[2] : "load-labels";
    dp_ctx *ctx;
    dp_loader_info info;
    dp_idx_info pictures;
    dp_value place;
    set s;
    if (argc != 3)
        make_files(images, labels);
    DP_CHECK(dp_open(NULL, &ctx));
    DP_CHECK(dp_idx_open(ctx, images, &s.images));
    DP_CHECK(dp_idx_open(ctx, labels, &s.labels));
    DP_CHECK(dp_idx_info_get(s.images, &pictures));
    dp_loader *loader = new_loader(ctx, &s), *again = new_loader(ctx, &s);
    DP_CHECK(dp_loader_info_get(loader, &info));
    printf("%d pictures of %d x %d, %d batches an epoch\n", (int)pictures.shape[0],
           (int)pictures.shape[1], (int)pictures.shape[2], (int)info.batch_count);
    rest_of_epoch(ctx, loader, INT32_MAX);
    rest_of_epoch(ctx, loader, (int)info.batch_count / 2);
    dp_scope *scope = dp_scope_begin(ctx);
    DP_CHECK(dp_loader_save(loader, scope, &place)); /* a dict of numbers, for a checkpoint */
    DP_CHECK(dp_loader_load(again, place));
    DP_CHECK(dp_loader_info_get(again, &info));
    printf("epoch %d: on from batch %d\n", (int)info.epoch, (int)info.number);
    rest_of_epoch(ctx, again, INT32_MAX);
    dp_close(ctx); /* and the files */
    if (argc != 3) {
        remove(images);
        remove(labels);
    }
    return 0;
}
