/* gpt.h - an existing program, which has never heard of dp.h: a small transformer that learns to
   continue text, in plain C. All parameters lie in one block, all gradients in another, everything
   that backward needs from a forward in a third. The loss is the mean over the rows of a batch, and
   gpt_backward divides by their number itself. Matrix products are loops, or with GPT_BLAS defined
   those of a BLAS. */
#ifndef GPT_H
#define GPT_H

#if defined(GPT_BLAS)
#include <cblas.h>
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct gpt_shape {
    int layers, heads, channels, context, vocabulary;
} gpt_shape;

enum { GPT_EMBED, GPT_PLACE, GPT_QKV, GPT_PROJ, GPT_UP, GPT_DOWN, GPT_TENSORS };
enum { GPT_MAX_LAYERS = 8 };

typedef struct gpt_layer { /* what backward needs of a layer */
    float *x, *norm, *qkv, *weights, *mixed, *middle, *norm2, *up;
} gpt_layer;

typedef struct gpt {
    gpt_shape shape;
    float *params[GPT_TENSORS], *grads[GPT_TENSORS]; /* each points into its block */
    float *tape;                                     /* one block: what follows points into it */
    gpt_layer layers[GPT_MAX_LAYERS];
    float *last, *last_norm, *odds;
    float *d, *d_norm, *d_wide, *d_mixed; /* gradients going backward */
    int rows;                             /* of the last forward */
    const uint8_t *tokens, *targets;
    void (*layer_done)(void *user, int layer); /* NULL, or told when backward has its gradients */
    void *user;
} gpt;

static size_t gpt_count(const gpt_shape *s, int tensor)
{
    const size_t c = (size_t)s->channels, l = (size_t)s->layers;
    const size_t counts[GPT_TENSORS] = {[GPT_EMBED] = (size_t)s->vocabulary * c,
                                        [GPT_PLACE] = (size_t)s->context * c,
                                        [GPT_QKV] = l * c * 3 * c,
                                        [GPT_PROJ] = l * c * c,
                                        [GPT_UP] = l * c * 4 * c,
                                        [GPT_DOWN] = l * 4 * c * c};
    return counts[tensor];
}

static size_t gpt_param_count(const gpt_shape *shape)
{
    size_t all = 0;
    for (int i = 0; i < GPT_TENSORS; i++)
        all += gpt_count(shape, i);
    return all;
}

/* Where each tensor begins in a block. */
static void gpt_point(float *tensors[GPT_TENSORS], const gpt_shape *shape, float *block)
{
    for (int i = 0; i < GPT_TENSORS; block += gpt_count(shape, i++))
        tensors[i] = block;
}

static float *gpt_take(float **block, size_t count)
{
    float *taken = *block;
    *block += taken != NULL ? count : 0;
    return taken;
}

/* Room for batches of up to `rows` rows; false when there is no memory. */
static int gpt_tape_create(gpt *g, const gpt_shape *shape, int rows)
{
    const size_t c = (size_t)shape->channels, n = (size_t)rows * (size_t)shape->context;
    const size_t scores = n * (size_t)(shape->heads * shape->context);
    const size_t each = (4 * n * c + 3 * n * c + scores + n * c + 4 * n * c);
    const size_t rest = (2 * n * c + n * (size_t)shape->vocabulary + 2 * n * c + 5 * n * c);
    g->shape = *shape;
    g->tape = calloc((size_t)shape->layers * each + rest, sizeof(float));
    float *at = g->tape;
    for (int l = 0; l < shape->layers; l++) {
        gpt_layer *own = &g->layers[l];
        *own = (gpt_layer){.x = gpt_take(&at, n * c),
                           .norm = gpt_take(&at, n * c),
                           .qkv = gpt_take(&at, 3 * n * c),
                           .weights = gpt_take(&at, scores),
                           .mixed = gpt_take(&at, n * c),
                           .middle = gpt_take(&at, n * c),
                           .norm2 = gpt_take(&at, n * c),
                           .up = gpt_take(&at, 4 * n * c)};
    }
    g->last = gpt_take(&at, n * c);
    g->last_norm = gpt_take(&at, n * c);
    g->odds = gpt_take(&at, n * (size_t)shape->vocabulary);
    g->d = gpt_take(&at, n * c);
    g->d_norm = gpt_take(&at, n * c);
    g->d_wide = gpt_take(&at, 4 * n * c);
    g->d_mixed = gpt_take(&at, n * c);
    return g->tape != NULL;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

#if defined(GPT_BLAS)
/* out[n, m] (+)= x[n, k] * w[k, m] */
static void gpt_matmul(float *out, const float *x, const float *w, int n, int k, int m, int add)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, m, k, 1, x, k, w, m,
                (float)(add != 0), out, m);
}

/* dx[n, k] = d[n, m] * w', dw[k, m] += x' * d */
static void gpt_matmul_back(float *dx, float *dw, const float *d, const float *x, const float *w,
                            int n, int k, int m)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, k, m, 1, d, m, w, m, 0, dx, k);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, k, m, n, 1, x, k, d, m, 1, dw, m);
}
#else
/* out[n, m] (+)= x[n, k] * w[k, m] */
static void gpt_matmul(float *restrict out, const float *x, const float *w, int n, int k, int m,
                       int add)
{
    for (int i = 0; i < n; i++, out += m, x += k) {
        if (!add)
            memset(out, 0, (size_t)m * sizeof *out);
        for (int a = 0; a < k; a++)
            for (int b = 0; b < m; b++)
                out[b] += x[a] * w[a * m + b];
    }
}

/* dx[n, k] = d[n, m] * w', dw[k, m] += x' * d */
static void gpt_matmul_back(float *restrict dx, float *restrict dw, const float *d, const float *x,
                            const float *w, int n, int k, int m)
{
    for (int i = 0; i < n; i++, d += m, x += k, dx += k)
        for (int a = 0; a < k; a++) {
            float sum = 0;
            for (int b = 0; b < m; b++) {
                sum += d[b] * w[a * m + b];
                dw[a * m + b] += x[a] * d[b];
            }
            dx[a] = sum;
        }
}
#endif

/* Each row divided by its root mean square. */
static void gpt_norm(float *out, const float *x, int n, int c)
{
    for (int i = 0; i < n; i++, x += c, out += c) {
        float sum = 0;
        for (int k = 0; k < c; k++)
            sum += x[k] * x[k];
        for (int k = 0; k < c; k++)
            out[k] = x[k] / sqrtf(sum / (float)c + 1e-5f);
    }
}

/* dx += */
static void gpt_norm_back(float *dx, const float *d, const float *out, const float *x, int n, int c)
{
    for (int i = 0; i < n; i++, x += c, out += c, d += c, dx += c) {
        float sum = 0, mean = 0;
        for (int k = 0; k < c; k++) {
            sum += x[k] * x[k];
            mean += d[k] * out[k] / (float)c;
        }
        for (int k = 0; k < c; k++)
            dx[k] += (d[k] - out[k] * mean) / sqrtf(sum / (float)c + 1e-5f);
    }
}

static void gpt_softmax(float *x, int n)
{
    float top = x[0], sum = 0;
    for (int i = 1; i < n; i++)
        top = fmaxf(top, x[i]);
    for (int i = 0; i < n; i++)
        sum += x[i] = expf(x[i] - top);
    for (int i = 0; i < n; i++)
        x[i] /= sum;
}

/* One head at one place: what it reads from the places up to its own. */
static void gpt_attend(const gpt *g, const gpt_layer *l, int row, int head, int t)
{
    const int c = g->shape.channels, size = c / g->shape.heads, T = g->shape.context;
    const float *qkv = l->qkv + (size_t)(row * T) * 3 * (size_t)c + head * size;
    const float *q = qkv + t * 3 * c;
    float *w = l->weights + (size_t)((row * g->shape.heads + head) * T + t) * (size_t)T;
    float *out = l->mixed + (row * T + t) * c + head * size;
    for (int s = 0; s <= t; s++) {
        w[s] = 0;
        for (int k = 0; k < size; k++)
            w[s] += q[k] * qkv[s * 3 * c + c + k] / sqrtf((float)size);
    }
    gpt_softmax(w, t + 1);
    memset(out, 0, (size_t)size * sizeof *out);
    for (int s = 0; s <= t; s++)
        for (int k = 0; k < size; k++)
            out[k] += w[s] * qkv[s * 3 * c + 2 * c + k];
}

/* d_qkv += */
static void gpt_attend_back(const gpt *g, const gpt_layer *l, int row, int head, int t,
                            float *d_qkv)
{
    const int c = g->shape.channels, size = c / g->shape.heads, T = g->shape.context;
    const size_t first = (size_t)(row * T) * 3 * (size_t)c + (size_t)(head * size);
    const float *qkv = l->qkv + first, *q = qkv + t * 3 * c;
    const float *w = l->weights + (size_t)((row * g->shape.heads + head) * T + t) * (size_t)T;
    const float *d = g->d_mixed + (row * T + t) * c + head * size;
    float *dk = d_qkv + first, *dq = dk + t * 3 * c, mean = 0;
    for (int s = 0; s <= t; s++)
        for (int k = 0; k < size; k++)
            mean += w[s] * d[k] * qkv[s * 3 * c + 2 * c + k];
    for (int s = 0; s <= t; s++) {
        float dw = -mean;
        for (int k = 0; k < size; k++) {
            dw += d[k] * qkv[s * 3 * c + 2 * c + k];
            dk[s * 3 * c + 2 * c + k] += w[s] * d[k];
        }
        for (int k = 0; k < size; k++) {
            dq[k] += w[s] * dw * qkv[s * 3 * c + c + k] / sqrtf((float)size);
            dk[s * 3 * c + c + k] += w[s] * dw * q[k] / sqrtf((float)size);
        }
    }
}

/* ---- the model ------------------------------------------------------------------------------- */

static void gpt_layer_forward(gpt *g, int l, float *out)
{
    const int c = g->shape.channels, T = g->shape.context, n = g->rows * T;
    gpt_layer *own = &g->layers[l];
    gpt_norm(own->norm, own->x, n, c);
    gpt_matmul(own->qkv, own->norm, g->params[GPT_QKV] + l * 3 * c * c, n, c, 3 * c, 0);
    for (int i = 0; i < n * g->shape.heads; i++)
        gpt_attend(g, own, i / T / g->shape.heads, i / T % g->shape.heads, i % T);
    memcpy(own->middle, own->x, (size_t)(n * c) * sizeof(float));
    gpt_matmul(own->middle, own->mixed, g->params[GPT_PROJ] + l * c * c, n, c, c, 1);
    gpt_norm(own->norm2, own->middle, n, c);
    gpt_matmul(own->up, own->norm2, g->params[GPT_UP] + l * 4 * c * c, n, c, 4 * c, 0);
    for (int i = 0; i < n * 4 * c; i++)
        own->up[i] = fmaxf(own->up[i], 0);
    memcpy(out, own->middle, (size_t)(n * c) * sizeof(float));
    gpt_matmul(out, own->up, g->params[GPT_DOWN] + l * 4 * c * c, n, 4 * c, c, 1);
}

/* g->d: of the layer's output, becomes that of its input. */
static void gpt_layer_backward(gpt *g, int l)
{
    const int c = g->shape.channels, T = g->shape.context, n = g->rows * T;
    const gpt_layer *own = &g->layers[l];
    gpt_matmul_back(g->d_wide, g->grads[GPT_DOWN] + l * 4 * c * c, g->d, own->up,
                    g->params[GPT_DOWN] + l * 4 * c * c, n, 4 * c, c);
    for (int i = 0; i < n * 4 * c; i++)
        g->d_wide[i] = own->up[i] > 0 ? g->d_wide[i] : 0;
    gpt_matmul_back(g->d_norm, g->grads[GPT_UP] + l * 4 * c * c, g->d_wide, own->norm2,
                    g->params[GPT_UP] + l * 4 * c * c, n, c, 4 * c);
    gpt_norm_back(g->d, g->d_norm, own->norm2, own->middle, n, c);
    gpt_matmul_back(g->d_mixed, g->grads[GPT_PROJ] + l * c * c, g->d, own->mixed,
                    g->params[GPT_PROJ] + l * c * c, n, c, c);
    memset(g->d_wide, 0, (size_t)(n * 3 * c) * sizeof(float));
    for (int i = 0; i < n * g->shape.heads; i++)
        gpt_attend_back(g, own, i / T / g->shape.heads, i / T % g->shape.heads, i % T, g->d_wide);
    gpt_matmul_back(g->d_norm, g->grads[GPT_QKV] + l * 3 * c * c, g->d_wide, own->norm,
                    g->params[GPT_QKV] + l * 3 * c * c, n, c, 3 * c);
    gpt_norm_back(g->d, g->d_norm, own->norm, own->x, n, c);
}

/* The mean loss of `rows` rows of shape.context tokens; target i is the token that follows i. */
static float gpt_forward(gpt *g, const uint8_t *tokens, const uint8_t *targets, int rows)
{
    const int c = g->shape.channels, T = g->shape.context, n = rows * T, V = g->shape.vocabulary;
    float loss = 0;
    g->rows = rows;
    g->tokens = tokens;
    g->targets = targets;
    float *x = g->shape.layers > 0 ? g->layers[0].x : g->last;
    for (int i = 0; i < n * c; i++)
        x[i] = g->params[GPT_EMBED][tokens[i / c] * c + i % c] +
               g->params[GPT_PLACE][i / c % T * c + i % c];
    for (int l = 0; l < g->shape.layers; l++)
        gpt_layer_forward(g, l, l + 1 < g->shape.layers ? g->layers[l + 1].x : g->last);
    gpt_norm(g->last_norm, g->last, n, c);
    for (int i = 0; i < n; i++) {
        float *odds = g->odds + i * V;
        for (int v = 0; v < V; v++) {
            odds[v] = 0;
            for (int k = 0; k < c; k++)
                odds[v] += g->last_norm[i * c + k] * g->params[GPT_EMBED][v * c + k];
        }
        gpt_softmax(odds, V);
        loss -= logf(odds[targets[i]] + 1e-30f) / (float)n;
    }
    return loss;
}

static void gpt_zero_grad(gpt *g)
{
    memset(g->grads[0], 0, gpt_param_count(&g->shape) * sizeof(float));
}

/* Adds to the gradients those of the last forward's loss. */
static void gpt_backward(gpt *g)
{
    const int c = g->shape.channels, T = g->shape.context, n = g->rows * T;
    const int V = g->shape.vocabulary;
    memset(g->d_norm, 0, (size_t)(n * c) * sizeof(float));
    memset(g->d, 0, (size_t)(n * c) * sizeof(float));
    for (int i = 0; i < n * V; i++) {
        const int at = i / V, v = i % V;
        const float d = (g->odds[i] - (float)(v == g->targets[at])) / (float)n;
        for (int k = 0; k < c; k++) {
            g->d_norm[at * c + k] += d * g->params[GPT_EMBED][v * c + k];
            g->grads[GPT_EMBED][v * c + k] += d * g->last_norm[at * c + k];
        }
    }
    gpt_norm_back(g->d, g->d_norm, g->last_norm, g->last, n, c);
    for (int l = g->shape.layers - 1; l >= 0; l--) {
        gpt_layer_backward(g, l);
        if (g->layer_done != NULL)
            g->layer_done(g->user, l);
    }
    for (int i = 0; i < n * c; i++) {
        g->grads[GPT_EMBED][g->tokens[i / c] * c + i % c] += g->d[i];
        g->grads[GPT_PLACE][i / c % T * c + i % c] += g->d[i];
    }
    if (g->layer_done != NULL) /* the embeddings stand for one more layer */
        g->layer_done(g->user, g->shape.layers);
}

/* Elements first .. first + count - 1 of the block take a step. */
static void gpt_update(gpt *g, float rate, size_t first, size_t count)
{
    for (size_t i = first; i < first + count; i++)
        g->params[0][i] -= rate * g->grads[0][i];
}

/* What parameters begin with: numbers from -0.1 to 0.1. */
static inline void gpt_begin(float *block, const gpt_shape *shape)
{
    unsigned seed = 1;
    for (size_t i = 0; i < gpt_param_count(shape); i++) {
        seed = seed * 1664525u + 1013904223u;
        block[i] = ((float)(seed >> 8) / (1 << 24) - 0.5f) * 0.2f;
    }
}

/* Sums such as 3+5=8; in letters from 0 to 12, others for each number of a batch. */
static inline void gpt_draw(unsigned number, int rows, int context, uint8_t *tokens,
                            uint8_t *targets)
{
    unsigned seed = number * 2654435761u + 1;
    for (int row = 0; row < rows; row++)
        for (int t = 0, a = 0, b = 0; t < context; t++) {
            if (t % 6 == 0) {
                seed = seed * 1664525u + 1013904223u;
                a = (int)(seed >> 24) % 5;
                b = (int)(seed >> 16) % 5;
            }
            const int text[6] = {a, 10, b, 11, a + b, 12};
            tokens[row * context + t] = (uint8_t)text[t % 6];
            targets[row * context + (t + context - 1) % context] = (uint8_t)text[t % 6];
        }
}

#endif /* GPT_H */
