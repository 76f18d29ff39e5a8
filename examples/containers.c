/* containers.c - images of mixed sizes, as mmcv's collate and MMDataParallel take them.

   A sample is an image and notes about it. The container of a field says how it travels: images are
   stacked in groups of two, each group padded to its own largest image; notes stay on the host, as
   they are. Every device gets one group; the last batch of an epoch is cut where its groups end.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 examples/containers.c dp.o -o containers -lpthread -lm
   Prints:
   batch of 4
   device 0: 2 x 3 x 30 x 40, of a (20 x 40) and b (30 x 25)
   device 1: 2 x 3 x 18 x 50, of c (18 x 10) and d (12 x 50)
   brightness: a 0.10, b 0.20, c 0.30, d 0.40
   batch of 3
   device 0: 2 x 3 x 16 x 16, of e (16 x 16) and f (8 x 8)
   device 1: 1 x 3 x 24 x 20, of g (24 x 20)
   brightness: e 0.50, f 0.60, g 0.70 */

#include "../dp.h"
#include <stdio.h>

enum { DEVICES = 2, COLORS = 3, LINE = 120 };

typedef struct picture {
    const char *name;
    int height, width;
    float color; /* of every pixel */
} picture;

static char lines[DEVICES][LINE]; /* what each device saw */

/* ---- the model: mean brightness of each image, without its padding --------------------------- */

static double note(const dp_call *call, dp_value notes, size_t image, const char *key)
{
    double number = 0;
    DP_CHECK(dp_item(call->ctx, dp_get(dp_at(notes, image), key), &number));
    return number;
}

static void say(const dp_call *call, const dp_tensor *image, dp_value notes)
{
    char *line = lines[call->replica];
    int used = snprintf(line, LINE, "device %zu: %d x %d x %d x %d, of ", call->replica,
                        (int)image->shape[0], (int)image->shape[1], (int)image->shape[2],
                        (int)image->shape[3]);
    for (size_t i = 0; i < dp_count(notes); i++)
        used += snprintf(line + used, (size_t)(LINE - used), "%s%s (%.0f x %.0f)",
                         i > 0 ? " and " : "", dp_text(dp_get(dp_at(notes, i), "name")),
                         note(call, notes, i, "height"), note(call, notes, i, "width"));
}

static dp_status forward(dp_call *call)
{
    const dp_tensor *image;
    dp_tensor out;
    float means[8];
    dp_value notes = dp_get(call->kwargs, "notes"); /* a list: one entry per image in the group */
    DP_TRY(dp_call_tensor(call, "image", DP_F32, 4, &image));
    say(call, image, notes);
    int64_t plane = image->shape[2] * image->shape[3];
    for (size_t i = 0; i < dp_count(notes); i++) {
        const float *pixels = (const float *)image->data + (int64_t)i * COLORS * plane;
        double sum = 0;
        for (int64_t k = 0; k < COLORS * plane; k++)
            sum += (double)pixels[k]; /* padded with 0 */
        means[i] = (float)(sum / (COLORS * note(call, notes, i, "height") *
                                  note(call, notes, i, "width")));
    }
    DP_TRY(
        dp_tensor_from(call->scope, call->device, means, DP_F32, DP_SHAPE(image->shape[0]), &out));
    call->out = dp_of(call->scope, &out);
    return DP_OK;
}

/* ---- samples and batches --------------------------------------------------------------------- */

/* [readme-containers */
static dp_value sample(dp_scope *scope, const picture *p)
{
    size_t count = (size_t)(COLORS * p->height * p->width);
    float *pixels = dp_scope_alloc(scope, count * sizeof *pixels);
    for (size_t i = 0; pixels != NULL && i < count; i++)
        pixels[i] = p->color;
    dp_value image = dp_array(scope, pixels, DP_F32, DP_SHAPE(COLORS, p->height, p->width));
    dp_value notes = DP_DICT(scope, {"name", dp_string(scope, p->name)},
                             {"height", dp_int(p->height)}, {"width", dp_int(p->width)});
    return DP_DICT(scope, {"image", dp_stacked(scope, image, 0)},
                   {"notes", dp_cpu_only(scope, notes)});
}

static void look_at(dp_module *par, const picture *pictures, size_t count)
{
    dp_ctx *ctx = dp_module_ctx(par);
    dp_scope *step = dp_scope_begin(ctx);
    dp_value samples[4], batch, out;
    float means[4];
    for (size_t i = 0; i < count; i++)
        samples[i] = sample(step, &pictures[i]);
    DP_CHECK(dp_collate(step, samples, count, 2, &batch)); /* two samples per device */
    DP_CHECK(dp_invoke(par, step, "forward", dp_none(), batch, NULL, &out, NULL));
    DP_CHECK(dp_read(ctx, out.as.t, means, count * sizeof *means));
    printf("batch of %zu\n%s\n%s\nbrightness:", count, lines[0], lines[1]);
    for (size_t i = 0; i < count; i++)
        printf(" %s %.2f%s", pictures[i].name, (double)means[i], i + 1 < count ? "," : "\n");
    dp_scope_end(step);
}
/* readme-containers] */

int main(void)
{
    static const picture pictures[] = {
        {"a", 20, 40, 0.1f}, {"b", 30, 25, 0.2f}, {"c", 18, 10, 0.3f}, {"d", 12, 50, 0.4f},
        {"e", 16, 16, 0.5f}, {"f", 8, 8, 0.6f},   {"g", 24, 20, 0.7f}};
    static const dp_method methods[] = {{"forward", forward}};
    dp_ctx *ctx;
    dp_module *net, *par;
    DP_CHECK(dp_open(&(dp_config){.device_count = DEVICES}, &ctx));
    DP_CHECK(dp_module_create(
        ctx, &(dp_module_config){.name = "brightness", .methods = methods, .method_count = 1},
        &net));
    DP_CHECK(dp_container_parallel(net, NULL, &par));
    look_at(par, pictures, 4);
    look_at(par, pictures + 4, 3);
    dp_close(ctx);
    return 0;
}
