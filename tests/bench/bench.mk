# bench.mk - measures dp.h against its peers and against what the hardware gives.
#
#   make bench [ROWS=C1,C7] [ROUNDS=21] [BENCH_RUN='chrt -f 10'] [TORCH_PYTHON=venv/bin/python]
#   make bench-slow [SLOW='--loss 0.62 --rate 100 --delay 20']     over a slow link; as root
#   make bench-long [LONG='--rate 1000 --delay 20 --counts 1 8'] over a long one; as root
#
# BENCH_RUN is a command to measure under, as one that goes before the others on a busy machine. The
# torch of TORCH_PYTHON, its gloo and its optimizers stand beside those of the system's python3.
# The table says the truth and never fails the build: what could not be built is absent in it. The
# peers are other libraries; as root they are installed, if they are not here.

CC           ?= cc
STB_CFLAGS   ?=
BUILD        ?= build
ROWS         ?=
ROUNDS       ?= 21
BENCH_RUN    ?=
BENCH        := $(BUILD)/bench
BENCH_FLAGS  := -std=c11 -D_POSIX_C_SOURCE=200809L -O2 -g $(filter-out -Werror,$(WARNINGS)) \
    $(GCC_WARNINGS)
BENCH_TUNED   = $(shell echo 'int x;' | $(CC) -march=native -x c -c - -o /dev/null 2>/dev/null && \
    echo -march=native)
BENCH_OBJECTS := $(patsubst tests/bench/%.c,$(BENCH)/%.o,$(wildcard tests/bench/*.c)) $(BENCH)/dp.o

bench: $(BENCH)/bench $(BENCH)/peer_mpi $(BENCH)/peer_dp_mpi $(BENCH)/peer_gloo \
    $(BENCH)/peer_blas $(BENCH)/peer_steps $(BENCH)/peer_torch_dp
	-@BENCH_TORCH=$(if $(filter file,$(origin TORCH_PYTHON)),,$(TORCH_PYTHON)) \
	    $(BENCH_RUN) $(BENCH)/bench $(BENCH) $(ROUNDS) $(ROWS)

.PHONY: bench bench-slow bench-long model

# Two processes of Open MPI, in two network namespaces.
SLOW ?=
bench-slow: $(BENCH)/slow
	@tests/bench/slow/slow.py $< $(SLOW)

$(BENCH)/slow: tests/bench/slow/slow.c examples/gpt.h $(HEADERS) | $(BENCH)/peers.log
	@mpicc.openmpi -std=c11 -O2 $(STB_CFLAGS) $< -o $@ -lpthread -lm

# Two processes in two network namespaces, with nothing but the library.
LONG ?=
bench-long: $(BENCH)/long
	@tests/bench/long/long.py $< $(LONG)

$(BENCH)/long: tests/bench/long/long.c $(HEADERS)
	@mkdir -p $(@D)
	@$(CC) $(BENCH_FLAGS) $(STB_CFLAGS) $< -o $@ -lpthread -lm

# What a job of 2 to 16,384 processes costs, on paper and as far as it can be had here: a minute in
# which up to MODEL_MOST processes share this machine.
MODEL_MOST ?= 512
model: $(BENCH)/model
	@nice -n 10 $< $(MODEL_MOST)

$(BENCH)/model: tests/bench/model/model.c $(HEADERS)
	@mkdir -p $(@D)
	@$(CC) $(filter-out -D_POSIX_C_SOURCE=%,$(BENCH_FLAGS)) $(STB_CFLAGS) $< -o $@ -lpthread -lm -ldl

$(BENCH)/bench: $(BENCH_OBJECTS)
	@$(CC) $^ -o $@ -lpthread -lm -ldl

$(BENCH)/%.o: tests/bench/%.c
	@mkdir -p $(@D)
	@$(CC) $(BENCH_FLAGS) $(BENCH_TUNING) $(STB_CFLAGS) -MMD -MP -c $< -o $@

$(BENCH)/limit.o: BENCH_TUNING = -O3 $(BENCH_TUNED)

# The library itself is compiled as a user would.
$(BENCH)/dp.o: tests/dp.c
	@mkdir -p $(@D)
	@$(CC) -std=c11 -O2 -g -DTEST_ALONE -DTEST_TRAIN $(STB_CFLAGS) -MMD -MP -c $< -o $@

# ---- peers ---------------------------------------------------------------------------------------

BENCH_PACKAGES := g++ libgloo-dev openmpi-bin libopenmpi-dev python3-torch libtorch-dev \
    libopenblas0-pthread libopenblas-dev

$(BENCH)/peers.log:
	@mkdir -p $(@D)
	@if [ "$$(id -u)" = 0 ] && ! dpkg -s $(BENCH_PACKAGES) >/dev/null 2>&1; then \
	    echo "installing $(BENCH_PACKAGES) (log: $@)"; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    { apt-get -q update && apt-get -q -y --no-install-recommends install $(BENCH_PACKAGES); }; \
	fi >$@ 2>&1 || true

$(BENCH)/peer_mpi: tests/bench/peers/mpi.c | $(BENCH)/peers.log
	@mpicc -O2 $< -o $@ >$@.log 2>&1 || echo "no Open MPI (log: $@.log)"

$(BENCH)/peer_dp_mpi: tests/bench/peers/mpi.c tests/bench/peers/dp_steps.h $(HEADERS) | $(BENCH)/peers.log
	@mpicc -std=c11 -O2 -DBENCH_DP $(STB_CFLAGS) $< -o $@ -lpthread -lm >$@.log 2>&1 || echo "no Open MPI (log: $@.log)"

$(BENCH)/peer_gloo: tests/bench/peers/gloo.cpp | $(BENCH)/peers.log
	@g++ -std=c++17 -O2 -DGLOO_PACKAGE="\"$$(dpkg-query -W -f='$${Package} $${Version}' libgloo-dev)\"" $< -o $@ -lgloo -lpthread >$@.log 2>&1 || echo "no gloo (log: $@.log)"

$(BENCH)/peer_blas: tests/bench/peers/blas.c examples/im2col.h $(HEADERS) | $(BENCH)/peers.log
	@$(CC) -std=c11 -O2 -D_GNU_SOURCE -fopenmp $(STB_CFLAGS) $< -o $@ -lopenblas -lpthread -lm >$@.log 2>&1 || echo "no OpenBLAS (log: $@.log)"

# Models are tuned as their authors would.
$(BENCH)/peer_steps: tests/bench/peers/steps.c tests/bench/bench.h examples/gpt.h $(HEADERS) \
    $(BENCH)/base.o $(BENCH)/duo.o $(BENCH)/dp.o | $(BENCH)/peers.log
	@$(CC) $(BENCH_FLAGS) -O3 -ffast-math $(BENCH_TUNED) $(STB_CFLAGS) $(filter %.c %.o,$^) -o $@ \
	    -lopenblas -lpthread -lm >$@.log 2>&1 || echo "no OpenBLAS (log: $@.log)"

$(BENCH)/peer_torch_dp: tests/bench/peers/torch_dp.cpp examples/torch/dp_torch.hpp $(BENCH)/dp.o | $(BENCH)/peers.log
	@g++ -std=c++17 -O2 -isystem /usr/include/torch/csrc/api/include $(filter-out %.hpp,$^) -o $@ \
	    -ltorch -ltorch_cpu -lc10 -lpthread -lm >$@.log 2>&1 || echo "no libtorch (log: $@.log)"
