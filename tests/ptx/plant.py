#!/usr/bin/env python3
"""plant.py BUG PTX OUT: a copy of the PTX with a bug in it. Without arguments: each bug, what has
to find it (the name of a finding, or what translate.py says), and the words that select tests.
"""

import re
import sys


def kernel_of(text, name):
    begin = text.index(f".entry dp_cuda_{name}(")
    return begin, text.index("\n}\n", begin)


def replaced(name, pattern, replacement, text, which=1):
    """The nth place in the kernel where the pattern is."""
    begin, end = kernel_of(text, name)
    found = list(re.finditer(pattern, text[begin:end]))[which - 1]
    return text[:begin + found.start()] + found.expand(replacement) + text[begin + found.end():]


def barrier_missing(text):
    return replaced("stats_f32", r"bar\.sync\s+0;", "", text)


def next_chunk_begun_too_early(text):
    """Both of the last barriers are missing: either alone is enough."""
    for _ in range(2):
        text = replaced("channels_f32", r"bar\.sync\s+0;", "", text, 2)
    return text


def lanes_leave_before_a_barrier(text):
    leave = "{ .reg .pred gone; setp.gt.u32 gone, %tid.x, 200; @gone ret; }"
    return replaced("stats_f32", r"bar\.sync\s+0;", leave + r" \g<0>", text)


def lanes_at_different_barriers(text):
    apart = ("{ .reg .pred odd; setp.gt.u32 odd, %tid.x, 5; @odd bra PLANTED; bar.sync 0; "
             "bra ON; }\nPLANTED: bar.sync 0; ON:")
    return replaced("stats_f32", r"bar\.sync\s+0;", apart, text)


def contracted(text):
    """Products become part of the sums that read them."""
    begin, end = kernel_of(text, "axpby_f32")
    body = text[begin:end]
    products = dict(re.findall(r"mul\.rn\.f32\s+(%f\d+), ([^;]+);", body))
    for found in re.finditer(r"add\.rn\.f32\s+(%f\d+), (%f\d+), (%f\d+);", body):
        fused = f"fma.rn.f32 {found[1]}, {products.get(found[3])}, {found[2]};"
        body = body.replace(found[0], fused if found[3] in products else found[0])
    return text[:begin] + body + text[end:]


def pack_at_an_odd_address(text):
    return replaced("reduce_f32", r"(ld\.global\.v4\.f32[^\[]*\[%rd\d+)(\+\d+)?\]", r"\1+4]", text)


def one_element_more(text):
    return replaced("fill", r"setp\.ge\.u64", "setp.gt.u64", text, 2)


def stored_for_another(text):
    return replaced("cast", r"st\.global\.f32\s+\[(%rd\d+)\]", r"st.global.f32 [\1+4]", text)


def behind_the_parameters(text):
    return replaced("total", r"(ld\.param\.u64[^;]*_param_0)(\+\d+)?\]", r"\1+1504]", text)


def behind_shared_memory(text):
    return replaced("total", r"(st\.shared\.f64\s+\[%rd\d+)(\+\d+)?\]", r"\1+4096]", text)


def behind_local_memory(text):
    return replaced("reduce_f32", r"(ld\.local\.[^\[]*\[%rd\d+)(\+\d+)?\]", r"\1+1024]", text)


def second_round_too_far(text):
    """Where each lane has one element, that changes nothing."""
    further = r"mov.u32 \1, %nctaid.x; add.s32 \1, \1, 1;"
    return replaced("axpby_f32", r"mov\.u32\s+(%r\d+), %nctaid\.x;", further, text)


def rounding_left_to_the_driver(text):
    return replaced("axpby_f64", r"mul\.rn\.f64", "mul.f64", text)


def unknown_instruction(text):
    return replaced("adamw_f32", r"sqrt\.rn\.f32", "sqrt.approx.f32", text)


BUGS = [
    (barrier_missing, "shared race", "sums_as_the_cpu"),
    (next_chunk_begun_too_early, "shared race", "sums_of_channels_as_the_cpu"),
    (lanes_leave_before_a_barrier, "barrier of some", "sums_as_the_cpu"),
    (lanes_at_different_barriers, "barrier of some", "sums_as_the_cpu"),
    (contracted, "not the text", "weighted_sums_as_the_cpu"),
    (pack_at_an_odd_address, "misaligned", "reduces_as_the_cpu"),
    (one_element_more, "out of bounds", "fills_as_the_cpu"),
    (stored_for_another, "not the text", "casts_as_the_cpu"),
    (behind_the_parameters, "out of bounds", "sums_as_the_cpu"),
    (behind_local_memory, "out of bounds", "reduces_as_the_cpu"),
    (behind_shared_memory, "out of bounds", "sums_as_the_cpu"),
    (second_round_too_far, "order of lanes", "weighted_sums_as_the_cpu"),
    (rounding_left_to_the_driver, "mul.f64", ""),
    (unknown_instruction, "sqrt.approx.f32", ""),
]


def main():
    if len(sys.argv) == 1:
        for bug, finding, words in BUGS:
            print(f"{bug.__name__}:{finding}:{words}")
        return
    bug = {bug.__name__: bug for bug, _, _ in BUGS}[sys.argv[1]]
    with open(sys.argv[2], encoding="ascii") as file:
        text = file.read()
    with open(sys.argv[3], "w", encoding="ascii") as file:
        file.write(bug(text))


if __name__ == "__main__":
    main()
