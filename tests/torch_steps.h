/* torch_steps.h - numbers that torch's optimizers step: where they begin, their gradients, and
   where they are after 50 steps. */

#ifndef TORCH_STEPS_H
#define TORCH_STEPS_H

#include "../dp_train.h"

enum { TORCH_ALL = 7 };

static const float beginning[TORCH_ALL] = {1, -2, 0.25f, 0, 3, -0.5f, 0.125f};

/* Numbers that every dtype has. */
static inline void grads_of(int step, float *out)
{
    for (int i = 0; i < TORCH_ALL; i++)
        out[i] = (float)((step * 7 + i * 13) % 17 - 8) / 8;
}

typedef struct rule_case { /* 50 steps by torch.optim 2.15, f32 */
    const char *name;
    const dp_rule *(*rule)(void);
    dp_hyper hyper;
    size_t states;
    float torch[TORCH_ALL];
} rule_case;

/* clang-format off */
static const rule_case rules[] = {
    {"sgd", dp_sgd, {.lr = 0.05}, 0,
     {1.01249993f, -2.01250005f, 0.212500006f, 0.0437500179f, 3.01874995f, -0.506250024f,
      0.09375f}},
    {"momentum", dp_sgd, {.lr = 0.02, .momentum = 0.9}, 1,
     {1.10137641f, -1.9138459f, 0.163033217f, 0.0455733947f, 3.01711583f, -0.621933877f,
      0.182342902f}},
    {"dampened, decayed", dp_sgd,
     {.lr = 0.03, .momentum = 0.8, .dampening = 0.25, .weight_decay = 0.02}, 1,
     {0.968964159f, -1.77764726f, 0.180839777f, 0.0530851632f, 2.74045777f, -0.548541248f,
      0.116420768f}},
    {"nesterov", dp_sgd, {.lr = 0.01, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01}, 1,
     {1.0046159f, -1.88230014f, 0.19478479f, 0.0289193615f, 2.88705468f, -0.533897281f,
      0.138070047f}},
    {"uphill", dp_sgd, {.lr = 0.05, .momentum = 0.5, .maximize = true}, 1,
     {0.987903237f, -2.02177477f, 0.300799638f, -0.0686019361f, 2.97618484f, -0.44052434f,
      0.150806248f}},
    {"adam", dp_adam, {.lr = 0.01}, 2,
     {1.02875721f, -1.99562502f, 0.217085153f, 0.0136108696f, 3.01443315f, -0.523979664f,
      0.13168624f}},
    {"adam, decayed", dp_adam,
     {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.05}, 2,
     {0.960381448f, -1.84504032f, 0.18298769f, 0.0273813307f, 2.80130839f, -0.500985563f,
      0.115973219f}},
    {"adamw", dp_adamw, {.lr = 0.01, .weight_decay = 0.1}, 2,
     {0.9785887f, -1.89811516f, 0.206424952f, 0.0130766528f, 2.86734056f, -0.49862963f,
      0.125261053f}},
    {"adam, no first momentum", dp_adam, {.lr = 0.02, .beta1 = DP_ZERO, .beta2 = 0.9}, 2,
     {0.995347381f, -2.01441407f, 0.209477052f, 0.0277401414f, 3.004704f, -0.505091369f,
      0.0860388502f}},
    {"adamw, no first momentum", dp_adamw,
     {.lr = 0.02, .beta1 = DP_ZERO, .beta2 = 0.9, .weight_decay = 0.1}, 2,
     {0.899304152f, -1.8245976f, 0.188529611f, 0.0272421129f, 2.7191608f, -0.455984086f,
      0.0745987892f}},
    {"adamw, uphill", dp_adamw, {.lr = 0.03, .beta1 = 0.7, .beta2 = 0.9, .maximize = true}, 2,
     {0.961949348f, -2.00399327f, 0.318020463f, -0.0467853323f, 2.96956444f, -0.44429782f,
      0.137324095f}},
};
/* clang-format on */

#endif /* TORCH_STEPS_H */
