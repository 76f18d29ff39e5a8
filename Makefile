# dp.h is a header: nothing has to be built to use it. This file runs its examples and tests.
#
#   make demo       build and run the examples; LIBTORCH=folder GGML=folder DARKNET=folder: those in
#                   folders of their own, with these libraries
#   make torch-backend  build/torch/dp_c10d: the backend "dp" of Python's torch.distributed, where pip
#                   install examples/torch is not wanted; TORCH_PYTHON=python3: the Python that has torch
#   make test       whether the library works here: one compiler, all suites once, simulated GPUs, the
#                   examples, an installation; minutes; ends with "N passed, N failed"
#   make test-all   everything below: other compilers, C libraries and processors, sanitizers, fuzzers,
#                   MPI, HIP (tests/README.md says what each is for); an hour's quarter, and packages
#   make install    headers, libdp, files for pkg-config and CMake, manual pages, into PREFIX=/usr/local;
#                   WITH="cuda nccl mpi": the library with these; DESTDIR= LIBDIR=lib MPICC= AR= CFLAGS=
#                   LDFLAGS=. make uninstall takes them away, make install-test tries both
#   make docs       build/docs/index.html: introductions, manuals of the headers and the examples as one
#                   static site, with a search that needs no server
#   make single     build/single/dp.h: dp.h and its rooms as one file; WITH="cuda nccl train": with
#                   these headers too
#   make dist       build/dist/dp-VERSION.tar.gz, with the single header, and its checksum; made of the same
#                   files it has the same bytes. make abi: install/abi.txt, which lint compares
#   make check      while developing: lint, and the tests with one compiler
#   make asan tsan  the tests under AddressSanitizer + UBSan, under ThreadSanitizer
#   make alone      a library with DP_ONE_PROCESS, and the suites of one process
#   make conform    BACKEND=path/to/its.h TABLE=function [COLL=function]: whether a table of yours keeps
#                   to the contract in dp.h (devices, collectives, wrappers); CONFORM_FLAGS are for
#                   its compiler, CONFORM_LIBS for its linker. Without arguments: tables of our own
#   make mpi        dp_mpi.h, with Open MPI and with MPICH, where they are
#   make sim        dp_cuda.h and dp_nccl.h on simulated GPUs; make sim-selftest: what the
#                   simulator finds
#   make hip        dp_hip.h on the same GPUs, which then have HIP's names
#   make ptx        the PTX that NVRTC makes of dp_cuda.h's kernels, in place of them on the simulated
#                   GPUs, for two architectures; make test does it for one
#   make gpu-test   the same suites on the GPUs of this machine; gpu-bench: figures; gpu-all: both in
#                   ten minutes, what is worth most first; results are in $OUT, or build/log/gpu
#   make gpu-pack   the folder build/pack, with which a machine without make, compiler and packages
#                   does the same: there, sh build/pack/gpu.sh all (tests/gpu/gpu.sh)
#   make fuzz       replay the fuzzers' corpora
#   make fuzz-run   let libFuzzer look for more: FUZZ=name, FUZZ_SECONDS=n for each
#   make bench      measure
#   make model      what 2 to 16,384 processes cost: measured to MODEL_MOST=512, and on paper
#   make faults     jobs whose processes are killed and stopped, whose disk is full, whose network is cut:
#                   500 trials and a table, in a quarter of an hour (tests/faults/faults.mk)
#   make members    all states of who goes on after a failure, for small jobs (tests/members); make
#                   explore: for larger ones, up to a bound that it prints, and all violations that are
#                   planted (20 minutes, 2 GB)
#   make simulate   whole jobs on a made-up system, each a number: SEEDS=n SEED=first; one failing seed
#                   alone, with its trace in words: make replay SEED=n WITHOUT='what it prints'; make
#                   simulate-plants: whether it finds mistakes that are planted (PLANT=word SEEDS=n)
#   make slurm-test examples/slurm.sbatch on a Slurm of two nodes, made for it here, as root
#   make lint format clean
#
# Results go to build/. With T=substring only the tests whose name holds it are run; of several words
# all must be in it, and of "!word" none.

SHELL   := $(shell command -v bash 2>/dev/null)
CC      := $(if $(filter default,$(origin CC)),$(if $(shell command -v gcc 2>/dev/null),gcc,cc),$(CC))
CLANG   ?= clang
FUZZ    ?=
FUZZ_SECONDS ?= 60
T       ?=

WARNINGS := -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wstrict-prototypes \
    -Wmissing-prototypes -Wold-style-definition -Wundef -Wcast-qual -Wcast-align -Wpointer-arith \
    -Wwrite-strings -Wvla -Wswitch-enum -Wformat=2 -Wnull-dereference -Wdouble-promotion \
    -Wimplicit-fallthrough -Wunused-macros -Wframe-larger-than=4096 -Werror
GCC_WARNINGS := $(if $(findstring clang,$(CC)),,\
    -Wlogical-op -Wduplicated-cond -Wjump-misses-init -Warith-conversion)

# dp.c stands for a user's file: it gets no more flags than theirs would. The tests use POSIX, and
# test_device.c includes an example.
TEST_DEFINES := -D_POSIX_C_SOURCE=200809L -I. -iquote tests
LIBS         := -lpthread -lm

# One binary a variant: build/VARIANT/tests. The sanitizers change what the compiler can prove, and
# the stack's size, so the warnings are for the plain builds alone. What is tested is optimized, the
# tests themselves compile fast; for a debugger, make with DEBUG=-g. With ASan and UBSan, which is for
# the library alone, it takes a compiler three times as long to optimize, and runs as fast without.
PLAIN_TEST  = $(filter test_%,$(notdir $*))
DEBUG      ?= -g1
VARIANTS   := gcc asan tsan aarch64 musl sim hip gpu conform
CC_gcc     := $(CC)
CC_asan    := $(CC)
CC_tsan    := $(CC)
CC_aarch64 := aarch64-linux-gnu-gcc
CC_musl    := musl-gcc
CFLAGS_gcc     = $(if $(PLAIN_TEST),-Og,-O2) $(DEBUG) $(WARNINGS) $(GCC_WARNINGS)
CFLAGS_checked = $(if $(PLAIN_TEST),-O0,-O1) $(DEBUG)
CFLAGS_asan    = -O0 $(DEBUG) -fsanitize=address $(if $(PLAIN_TEST),,-fsanitize=undefined) \
    -fno-sanitize-recover=all -fno-omit-frame-pointer
# What is not relocated is not written to: tests/contexts/test_leaks.c.
LINK_asan      = $(if $(filter Linux,$(SYSTEM)),-no-pie)
CFLAGS_tsan    = $(if $(PLAIN_TEST),-O0,-O1) $(DEBUG) -fsanitize=thread
CFLAGS_aarch64 = $(CFLAGS_checked) -static
CFLAGS_musl    = -O0 $(DEBUG) -static -isystem /usr/include/stb

# With dp_cuda.h and dp_nccl.h on the simulated GPUs of tests/sim.
CC_sim     := $(CC)
CFLAGS_sim = $(CFLAGS_checked) -DTEST_CUDA -DTEST_SIM -Itests/sim

# With dp_hip.h on the same GPUs, and the same objects of tests.
CC_hip     := $(CC)
CFLAGS_hip = -O0 $(DEBUG) -DTEST_CUDA -DTEST_SIM -DTEST_HIP -Itests/sim/hip -Itests/sim

# The suites for all tables, to be linked with the one that is on trial.
CC_conform     := $(CC)
CFLAGS_conform = -O0 $(DEBUG) -DTEST_CONFORM

# With CUDA itself, loaded when the tests run, and NCCL where it is (-DTEST_NCCL).
CC_gpu     := $(CC)
CFLAGS_gpu = $(CFLAGS_checked) -DTEST_CUDA -DDP_DYNAMIC_LOAD $(shell tests/gpu/gpu.sh flags)

# With dp_mpi.h, once for each MPI: mpicc.NAME stands for the compiler. Frames are measured in one.
CC_openmpi     := OMPI_CC=$(CC) mpicc.openmpi
CC_mpich       := MPICH_CC=$(CC) mpicc.mpich
CFLAGS_openmpi  = $(CFLAGS_checked) -DTEST_MPI
CFLAGS_mpich    = -O0 $(DEBUG) -DTEST_MPI -Wno-frame-larger-than

# Which files a binary is made of: tests/files says it.
of             = $(shell awk '!/^\#/ && / ($(1))( |$$)/ { print $$1 }' tests/files)
TESTS_gcc     := $(call of,cpu|gcc)
TESTS_asan    := $(call of,cpu|asan)
TESTS_tsan    := $(call of,cpu|tsan)
TESTS_with    := $(call of,cpu|with)
TESTS_alone   := $(call of,alone)
TESTS_conform := $(call of,conform)
TESTS_gpu     := $(call of,gpu)
TESTS_sim     := $(call of,sim)
TESTS_hip     := $(call of,hip)
TESTS_aarch64 := $(call of,aarch64)
TESTS_musl    := $(call of,musl)
TESTS_mpi     := $(call of,mpi)

EXAMPLES := $(patsubst %.c,build/%,$(filter-out examples/dp.c,$(sort $(wildcard examples/*.c)))) \
    $(if $(shell command -v $(CXX) 2>/dev/null),$(patsubst %.cpp,build/%_cpp,$(sort $(wildcard examples/*.cpp))))
CUDA_HOME ?= /usr/local/cuda
CUDA_EXAMPLES := build/examples/train_cuda# where there is cuBLAS
BLAS_EXAMPLES := build/examples/train_blas# where there is OpenBLAS
BLAS_HERE      = $(shell ls /usr/lib*/libopenblas.so /usr/lib*/*/libopenblas.so 2>/dev/null)
# Where libtorch is at hand: libtorch-dev, or LIBTORCH=folder, such as that of Python's package.
LIBTORCH  ?=
TORCH_HERE = $(if $(shell command -v $(CXX) 2>/dev/null),$(wildcard \
    $(or $(LIBTORCH),/usr)/include/torch/csrc/api/include/torch/torch.h))
TORCH_PYTHON ?= python3
export TORCH_PYTHON
# Where ggml is installed, in /usr or GGML=folder; and sources of darknet, in which it was built.
GGML         ?=
DARKNET      ?=
GGML_HERE     = $(wildcard $(or $(GGML),/usr)/include/ggml-opt.h)
DARKNET_HERE  = $(if $(DARKNET),$(wildcard $(DARKNET)/libdarknet.a))
FOREIGN       = $(if $(TORCH_HERE),build/examples/torch_ddp) $(if $(GGML_HERE),build/examples/train_ggml) \
    $(if $(DARKNET_HERE),build/examples/train_darknet)
FUZZERS  := $(patsubst tests/fuzz/%.c,%,$(sort $(wildcard tests/fuzz/fuzz_*$(FUZZ).c)))
HEADERS  := $(sort $(wildcard *.h dp/*.h))
SOURCES  := $(HEADERS) $(sort $(wildcard install/*.c examples/*.[ch] examples/*.cpp examples/*/*.[ch] examples/*/*.[ch]pp \
    $(foreach level,* */* */*/*,tests/$(level).[ch] tests/$(level).cpp)))

# Where make install puts things, and with what.
PREFIX  ?= /usr/local
LIBDIR  ?= lib
DESTDIR ?=
WITH    ?=
MPICC   ?= mpicc
SYSTEM  := $(shell uname -s)
SHARED  := $(if $(filter Darwin,$(SYSTEM)),dylib,so)
VERSION := $(shell sed -n '1s/.* v\([0-9.]*\) .*/\1/p' dp.h)
ABI     := $(basename $(VERSION))
GPU_WITH  = $(filter-out mpi,$(WITH))
LIB_LIBS  = $(LIBS) $(if $(GPU_WITH),$(if $(filter Linux,$(SYSTEM)),-ldl))
LIBRARIES = $(foreach name,dp $(if $(filter mpi,$(WITH)),dp-mpi),build/lib/lib$(name).a \
    build/lib/lib$(name).$(SHARED))
comma    := ,
MPI_LIBS  = $(if $(filter mpi,$(WITH)),$(filter -L% -l% -Wl%,$(shell $(MPICC) -show)))
space    := $(subst ,, )
quoted    = '$(subst ','\'',$(1))'
# Without . and .., as what is installed names it; abspath takes spaces for ends of names.
WHOLE_PREFIX = $(subst ?,$(space),$(abspath $(subst $(space),?,$(PREFIX))))
INSTALL   = PREFIX=$(call quoted,$(WHOLE_PREFIX)) LIBDIR=$(call quoted,$(LIBDIR)) \
    DESTDIR=$(call quoted,$(DESTDIR)) WITH='$(strip $(WITH))' \
    VERSION=$(VERSION) ABI=$(ABI) SYSTEM=$(SYSTEM) SHARED=$(SHARED) LIBS='$(strip $(LIB_LIBS))' \
    MPI_LIBS='$(MPI_LIBS)' install/install.sh

export CC CLANG T STB_CFLAGS WARNINGS GCC_WARNINGS LIBS BACKEND TABLE COLL
RUN := +@tests/run.sh

all: $(filter-out $(if $(wildcard $(CUDA_HOME)/include/cublas_v2.h),,$(CUDA_EXAMPLES)) \
    $(if $(BLAS_HERE),,$(BLAS_EXAMPLES)),$(EXAMPLES)) \
    $(FOREIGN) $(if $(TORCH_HERE),build/examples/test_torch)

DEMO = $(filter-out $(CUDA_EXAMPLES) $(if $(BLAS_HERE),,$(BLAS_EXAMPLES)),$(EXAMPLES))
demo: build/pictures build/blas
	@$(if $(BLAS_HERE),,echo "examples/train_blas.c is skipped: there is no libopenblas-dev")
	@$(if $(TORCH_HERE),,echo "examples/torch is skipped: there is no libtorch-dev$(comma) and no LIBTORCH=folder")
	@$(if $(GGML_HERE),,echo "examples/ggml is skipped: there is no ggml$(comma) and no GGML=folder")
	@$(if $(DARKNET_HERE),,echo "examples/darknet is skipped: there is no DARKNET=folder")
	+@$(MAKE) --no-print-directory $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$$(nproc || echo 2)) $(DEMO) \
	    $(FOREIGN)
	$(RUN) demo $(DEMO) $(FOREIGN)

test: export QUICK ?= 1
test: build/tools
	$(RUN) steps gcc sim examples install lint docs simulated

test-all: build/all-tools
	$(RUN) steps lint docs compile examples install gcc alone clang compilers musl mpi asan tsan sim hip ptx gpu conform fuzz faults members simulated aarch64

check:
	$(RUN) steps lint gcc examples

lint: # shows too how many private names each room uses of each other one
	$(RUN) steps $@ && cat build/lint/rooms

alone asan tsan sim hip mpi fuzz compile compilers musl members simulated:
	$(RUN) steps $@

compilers: export COMPILERS ?= all
asan tsan hip mpi compile check: export WHOLE ?= all

conform:
	$(RUN) $(if $(BACKEND),conform,steps conform)

install-test:
	$(RUN) steps install

ptx: export PTX_ARCHS ?= all
ptx:
	$(RUN) steps ptx

explore: export EXPLORE ?= --all
explore:
	$(RUN) steps members

SEED  ?= 1
SEEDS ?= 10000
simulate: build/simulated/run
	@$< -j $$(nproc || echo 2) $(SEEDS) $(SEED)

replay: build/simulated/run
	@$< =$(SEED) $(WITHOUT)

simulate-plants: build/simulated/run
	@tests/simulated/plant.py build/simulated/plants 0 1 $(CC) -std=gnu11 -O0 $(STB_CFLAGS)

sim-selftest: build/sim/selftest
	@$<

docs:
	@install/docs/docs.sh build/docs

docs-test:
	$(RUN) steps docs

single:
	@mkdir -p build/single
	@tests/single.sh build/single/dp.h $(WITH)

dist: build/whole/dp.h
	@install/dist.sh build/dist

abi:
	@install/abi.sh list >install/abi.txt

GPU_PACKED := $(addprefix build/gpu/,tests bench doctor hold)
gpu-pack: $(GPU_PACKED)
	@tests/gpu/gpu.sh pack build/pack $^

gpu-test gpu-bench gpu-all: gpu-pack
	@OUT=$${OUT:-build/log/gpu} sh build/pack/gpu.sh $(@:gpu-%=%)

fuzz-run: $(FUZZERS:%=build/libfuzzer/%)
	$(RUN) fuzz_more $(FUZZ_SECONDS) $^

install: $(LIBRARIES) build/whole/dp.h build/lib/dprun
	@$(INSTALL) install

uninstall:
	@$(INSTALL) uninstall

format:
	clang-format -i $(SOURCES)

clean:
	rm -rf build

.PHONY: all alone demo torch-backend test test-all check install uninstall install-test docs docs-test single dist abi asan tsan sim hip ptx mpi conform sim-selftest simulate simulate-plants replay simulated members explore gpu-test gpu-bench gpu-all gpu-pack fuzz fuzz-run bench lint compile compilers musl format clean
.DELETE_ON_ERROR:

# ---- what is needed besides a compiler; make reads config.mk, and so makes it first --------------

ifneq ($(filter-out clean docs format single uninstall,$(or $(MAKECMDGOALS),all)),)
include build/config.mk
endif

build/config.mk: tests/get.sh
	@tests/get.sh config $@

build/tools: tests/get.sh
	@tests/get.sh tools $@

build/all-tools: tests/get.sh
	@tests/get.sh all-tools $@

build/wheels: tests/get.sh
	@tests/get.sh wheels $@

build/pictures: tests/get.sh
	@tests/get.sh pictures $@

build/blas: tests/get.sh
	@tests/get.sh blas $@

# ---- binaries ------------------------------------------------------------------------------------

define variant
build/$(1)/tests: $$(TESTS_$(1):%=build/$(1)/%.o)
	$$(CC_$(1)) $$(CFLAGS_$(1)) $$(LINK_$(1)) $$^ -o $$@ $$(LIBS)

build/$(1)/%.o: tests/%.c Makefile build/config.mk
	@mkdir -p $$(@D)
	$$(CC_$(1)) -std=c11 $$(CFLAGS_$(1)) $$(if $$(filter dp,$$*),,$$(TEST_DEFINES)) $$(STB_CFLAGS) \
	    -MMD -MP -c $$< -o $$@
endef
$(foreach v,$(VARIANTS),$(eval $(call variant,$(v))))

# MPI's own wrappers know where it is.
define mpi_variant
build/$(1)/tests: $(TESTS_mpi:%=build/$(1)/%.o)
	$$(CC_$(1)) $$(CFLAGS_$(1)) $$^ -o $$@ $$(LIBS)

build/$(1)/%.o: tests/%.c Makefile build/config.mk
	@mkdir -p $$(@D)
	$$(CC_$(1)) -std=c11 $$(if $$(filter dp,$$*),$(WARNINGS),$$(TEST_DEFINES)) $$(CFLAGS_$(1)) \
	    $$(STB_CFLAGS) -MMD -MP -c $$< -o $$@
endef
$(foreach v,openmpi mpich,$(eval $(call mpi_variant,$(v))))

# All that is for the CPU as one file.
build/whole/dp.h: tests/single.sh $(HEADERS)
	@mkdir -p $(@D)
	@$< $@ array average check data local norm save train

# The library, compiled once. GPUs' libraries are loaded when a context opens, so that one libdp serves
# on machines with and without them. Of MPI only a library of its own knows. CFLAGS and LDFLAGS are
# those of who makes a package of it.
LIB_FLAGS   = -std=c11 -O2 -fPIC $(CPPFLAGS) $(CFLAGS) -fno-fast-math -fvisibility=default \
    -I. $(STB_CFLAGS) \
    $(if $(GPU_WITH),-DDP_DYNAMIC_LOAD $(addprefix -DDP_USE_,$(shell echo $(GPU_WITH) | tr a-z A-Z))) \
    $(if $(filter cuda nccl,$(WITH)),-isystem $(CUDA_HOME)/include)
LINK_SHARED = -shared -Wl,-soname,$(@F).$(ABI) -Wl,--version-script=build/lib/libdp.map \
    $(if $(filter Linux,$(SYSTEM)),-Wl$(comma)-z$(comma)defs)
ifeq ($(SYSTEM),Darwin)
LINK_SHARED = -dynamiclib -install_name "$(WHOLE_PREFIX)/$(LIBDIR)/lib$*.$(ABI).dylib"
endif

# What they were made with: written when it has changed.
build/lib/flags: FORCE
	@$(INSTALL) known
	@mkdir -p $(@D)
	@rm -f $@.new
	@echo $(call quoted,$(CC) $(MPICC) $(AR) $(LIB_FLAGS) $(LINK_SHARED) $(LDFLAGS)) >$@.new
	@cmp -s $@.new $@ || mv -f $@.new $@

build/lib/libdp.map: dp.h
	@mkdir -p $(@D)
	echo 'DP_$(ABI) { global: dp_*; local: *; };' >$@

build/lib/dp.o: install/libdp.c Makefile build/lib/flags build/config.mk
	$(CC) $(LIB_FLAGS) -MMD -MP -c $< -o $@

build/lib/dp-mpi.o: install/libdp.c Makefile build/lib/flags build/config.mk
	$(MPICC) $(LIB_FLAGS) -DDP_USE_MPI -MMD -MP -c $< -o $@

build/lib/lib%.a: build/lib/%.o
	@rm -f $@
	$(AR) rcs $@ $<

build/lib/lib%.$(SHARED): build/lib/%.o build/lib/libdp.map
	$(if $(filter dp-mpi,$*),$(MPICC),$(CC)) $(LINK_SHARED) $(CFLAGS) $(LDFLAGS) $< -o $@ $(LIB_LIBS)

.PRECIOUS: build/lib/%.o

# The library by another compiler and from one file, the tests by the usual one. What -Wnull-dereference guesses
# differs from one version of gcc to the next. clang alone knows that nothing may be added to NULL.
CLANG_TRAPS := -fsanitize=pointer-overflow -fsanitize-trap=pointer-overflow
build/with/%/dp.o: tests/dp.c build/whole/dp.h Makefile build/config.mk
	@mkdir -p $(@D)
	$* -std=c11 -O2 -fPIE -DTEST_WHOLE -Ibuild/whole $(WARNINGS) $(if $(findstring clang,$*),$(CLANG_TRAPS),$(GCC_WARNINGS)) \
	    -Wno-null-dereference $(STB_CFLAGS) -MMD -MP -c $< -o $@

build/with/%/tests: build/with/%/dp.o $(TESTS_with:%=build/gcc/%.o)
	$(CC) $(filter-out tests/%,$^) -o $@ $(LIBS)

.PRECIOUS: build/with/%/dp.o

# The library for one process, and the tests that the usual compiler has compiled.
build/alone/dp.o: tests/dp.c $(HEADERS) Makefile build/config.mk
	@mkdir -p $(@D)
	$(CC) -std=c11 -DDP_ONE_PROCESS $(CFLAGS_checked) $(WARNINGS) $(GCC_WARNINGS) $(STB_CFLAGS) -MMD -MP -c $< -o $@

build/alone/tests: build/alone/dp.o $(TESTS_alone:%=build/gcc/%.o)
	$(CC) $^ -o $@ $(LIBS)

# What clang says of the tests, which the usual compiler compiles.
build/clang/silent: $(patsubst %,build/clang/%.silent,$(filter-out dp,$(TESTS_gcc)))
	@touch $@

build/clang/%.silent: tests/%.c Makefile build/config.mk
	@mkdir -p $(@D)
	@mkdir -p $(@D)
	$(CLANG) -std=c11 -fsyntax-only $(WARNINGS) $(TEST_DEFINES) $(STB_CFLAGS) \
	    -MMD -MP -MT $@ -MF $@.d $<
	@touch $@

# make build/conform/NAME/tests BACKEND=header TABLE=function [COLL=function]
CONFORM_OBJECTS := $(TESTS_conform:%=build/conform/%.o)
build/conform/%/tests: tests/conform.c $(CONFORM_OBJECTS) Makefile build/config.mk FORCE
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CFLAGS_conform) $(TEST_DEFINES) $(STB_CFLAGS) -DCONFORM_BACKEND='"$(abspath $(BACKEND))"' \
	    -DCONFORM_TABLE=$(TABLE) -DCONFORM_COLL='$(if $(COLL),$(COLL)(),NULL)' $(CONFORM_FLAGS) \
	    $< $(CONFORM_OBJECTS) -o $@ $(LIBS) $(CONFORM_LIBS)

FORCE:

build/gpu/tests: LIBS += -ldl

# Few of the suites, to see that what is packed runs: tests/gpu/proof.sh.
build/gpu/few/tests: $(patsubst %,build/gpu/%.o,test_main gpus/test_cuda_kernels contexts/test_device dp cuda_calls)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_gpu) $^ -o $@ $(LIBS) -ldl

# The library comes from the tests' object, which has tests in it.
build/gpu/doctor: examples/doctor.c build/gpu/dp.o build/gpu/test_main.o Makefile build/config.mk
	@mkdir -p $(@D)
	objcopy --redefine-sym main=main_of_tests build/gpu/test_main.o $@.tests.o
	$(CC) -std=c11 -O2 -DDP_USE_CUDA $(if $(findstring TEST_NCCL,$(CFLAGS_gpu)),-DDP_USE_NCCL) \
	    -I. $(STB_CFLAGS) $< build/gpu/dp.o $@.tests.o -o $@ $(LIBS) -ldl

build/gpu/hold: tests/gpu/hold.c Makefile
	@mkdir -p $(@D)
	$(CC) -std=c11 -O2 $(TEST_DEFINES) $< -o $@ -ldl

# What measures; few/bench, which only shows that it runs, is compiled faster.
build/gpu/bench build/gpu/few/bench: tests/bench/gpu/gpu.c build/gpu/cuda_calls.o $(HEADERS) Makefile build/config.mk
	@mkdir -p $(@D)
	$(CC) -std=c11 $(if $(findstring few,$@),-O0,-O2) -DDP_DYNAMIC_LOAD -I. $(shell tests/gpu/gpu.sh flags) $(STB_CFLAGS) $< \
	    build/gpu/cuda_calls.o -o $@ $(LIBS) -ldl

# The simulator is one object: who links it need not know its parts.
SIM := build/sim/sim/sim_cuda.o build/sim/sim/kernels.o
SIM_PARTS := $(patsubst %,build/sim/sim/parts/%.o,sim_cuda sim_nccl sim_world)
build/sim/tests: $(SIM)
build/hip/tests: $(patsubst %,build/sim/%.o,$(filter-out dp gpus/test_cuda_load,$(TESTS_sim))) \
    build/sim/sim/sim_hip.o $(SIM)

build/sim/bench: tests/bench/gpu/gpu.c $(SIM) $(HEADERS)
	$(CC) -std=c11 -O0 -g $(WARNINGS) $(GCC_WARNINGS) -Wno-frame-larger-than \
	    -Wno-null-dereference -DTEST_SIM -I. -Itests/sim $(STB_CFLAGS) $< $(SIM) -o $@ $(LIBS)

build/members/explore: tests/members/explore.c tests/members/settle.h dp/members.h Makefile
	@mkdir -p $(@D)
	$(CC) -std=c11 -O2 $(DEBUG) $(WARNINGS) $(GCC_WARNINGS) -D_POSIX_C_SOURCE=200809L $< -o $@

# A made-up system, and the library of a process on it, once for each.
SIMULATED := $(patsubst %,build/simulated/%.o,baton wire disk plan run)
SIMULATED_PROCESSES := $(patsubst %,build/simulated/process%.so,0 1 2 3 4 5 6 7 8 9 10 11)
SIMULATED_FLAGS := -std=gnu11 -O1 -g -fno-omit-frame-pointer

build/simulated/%.o: tests/simulated/%.c $(wildcard tests/simulated/*.h) Makefile
	@mkdir -p $(@D)
	$(CC) $(SIMULATED_FLAGS) $(filter-out -Wframe-larger-than=4096,$(WARNINGS)) -c $< -o $@

build/simulated/process.so: $(addprefix tests/simulated/,process.c steps.h system.h sim.h) \
    $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(SIMULATED_FLAGS) -fPIC -shared -Wall -Wextra -Werror -Itests/simulated -I. \
	    $(STB_CFLAGS) $< -o $@ -lm

$(SIMULATED_PROCESSES): build/simulated/process.so
	@cp $< $@

build/simulated/run: $(SIMULATED) $(SIMULATED_PROCESSES)
	$(CC) -rdynamic $(SIMULATED) -o $@ -ldl

build/sim/selftest: build/sim/sim/selftest.o $(SIM)
	$(CC) -g $^ -o $@ $(LIBS)

build/sim/sim/sim_cuda.o: $(SIM_PARTS)
	$(CC) -r -nostdlib $^ -o $@

# As a library that a program loads by CUDA's names: tests/sim/library.c stands before the simulator.
build/sim/library.so: build/sim/sim/library.o $(SIM)
	objcopy --redefine-sym cudaMemcpyAsync=sim_plain_memcpy build/sim/sim/sim_cuda.o $(@D)/sim_plain.o
	objcopy --redefine-sym sim_kernel_run=sim_plain_run build/sim/sim/kernels.o $(@D)/kernels_plain.o
	$(CC) -shared $< $(@D)/sim_plain.o $(@D)/kernels_plain.o -o $@ $(LIBS)

COMPILE_SIM = $(CC) -std=c11 -O2 -g -fPIC -fsanitize=alignment $(WARNINGS) $(GCC_WARNINGS) \
    -Wno-frame-larger-than -D_GNU_SOURCE -I. -Itests/sim $(STB_CFLAGS) -MMD -MP -c $< -o $@
$(SIM_PARTS): build/sim/sim/parts/%.o: tests/sim/%.c Makefile build/config.mk
	@mkdir -p $(@D)
	$(COMPILE_SIM)

build/sim/sim/kernels.o build/sim/sim/selftest.o build/sim/sim/library.o build/sim/sim/sim_hip.o: build/sim/sim/%.o: tests/sim/%.c Makefile build/config.mk
	@mkdir -p $(@D)
	$(COMPILE_SIM)

# The kernels as PTX, as C that does what it says, and the tests with that linked in: NAME is an
# architecture's, or that of a bug which tests/ptx/plant.py has put into a copy.
PTX_OPTIMIZE ?= -O1
build/ptx/write: tests/ptx/write.c $(HEADERS) Makefile build/config.mk
	@mkdir -p $(@D)
	$(CC) -std=c11 -O0 $(WARNINGS) $(GCC_WARNINGS) -Wno-null-dereference -Wno-frame-larger-than \
	    -DDP_DYNAMIC_LOAD -I. $(shell tests/gpu/gpu.sh flags) $(STB_CFLAGS) $< -o $@ $(LIBS) -ldl

build/ptx/sm_%.ptx: build/ptx/write
	$< $* $@

build/ptx/%.c: build/ptx/%.ptx tests/ptx/translate.py
	tests/ptx/translate.py $< $@

build/ptx/%.o: build/ptx/%.c tests/ptx/ptx.h tests/sim/grid.h
	$(CC) -std=c11 $(PTX_OPTIMIZE) -ffp-contract=off -w -Itests/ptx -c $< -o $@

build/ptx/%/tests: build/ptx/%.o $(TESTS_sim:%=build/sim/%.o) $(SIM)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_sim) $^ -o $@ $(LIBS)

.PRECIOUS: build/ptx/sm_%.ptx build/ptx/%.c build/ptx/%.o

# The library as a user's compiler makes it, and the examples, which are linked with it.
build/examples/dp.o: examples/dp.c Makefile build/config.mk
	@mkdir -p $(@D)
	$(CC) -std=c11 -O2 $(STB_CFLAGS) -MMD -MP -c $< -o $@

build/examples/dp_cuda.o: examples/dp.c Makefile build/config.mk
	@mkdir -p $(@D)
	$(CC) -std=c11 $(or $(CUDA_OPTIMIZE),-O2) -DDP_USE_CUDA -isystem $(CUDA_HOME)/include $(STB_CFLAGS) \
	    -MMD -MP -c $< -o $@

build/examples/%: examples/%.c Makefile build/config.mk
	@mkdir -p $(@D)
	@echo "$(CC) $<"
	@$(CC) -std=c11 $(CFLAGS_gcc) -I. $(STB_CFLAGS) -MMD -MP -MT $@ -MF $@.d $< $(filter %.o,$^) -o $@ $(LIBS)

ALONE := build/examples/dprun build/examples/status build/examples/timeline
$(filter-out $(ALONE) $(CUDA_EXAMPLES) %_cpp,$(EXAMPLES)): build/examples/dp.o

# What is installed is made as the library is, and no warning of its compiler stops that.
build/lib/dprun: examples/dprun.c examples/status.c Makefile build/lib/flags
	$(CC) -std=c11 -O2 $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) $< -o $@ $(LIBS)

# C++ links what is compiled once.
build/examples/%_cpp: examples/%.cpp build/examples/dp.o Makefile
	@mkdir -p $(@D)
	@echo "$(CXX) $<"
	@$(CXX) -std=c++17 -O2 -Wall -Wextra -Wconversion -Wold-style-cast -Werror -I. \
	    -MMD -MP -MT $@ -MF $@.d $< build/examples/dp.o -o $@ $(LIBS)

# Newer ones than Debian's are C++20. Their headers are for other warnings.
TORCH_CXX = $(CXX) -std=$(if $(LIBTORCH),c++20,c++17) -Wall -Wextra -Wconversion -Wold-style-cast -Werror \
    $(if $(LIBTORCH),-isystem $(LIBTORCH)/include) \
    -isystem $(or $(LIBTORCH),/usr)/include/torch/csrc/api/include -MMD -MP -MT $@ -MF $@.d
build/examples/torch_ddp: examples/torch/torch_ddp.cpp
build/examples/test_torch: tests/torch/test_torch.cpp
build/examples/torch_ddp build/examples/test_torch: build/examples/dp.o Makefile
	@mkdir -p $(@D)
	@echo "$(CXX) $(filter %.cpp,$^)"
	@$(TORCH_CXX) -O2 $(filter %.cpp %.o,$^) -o $@ \
	    $(if $(LIBTORCH),-L$(LIBTORCH)/lib -Wl$(comma)-rpath$(comma)$(LIBTORCH)/lib) \
	    -ltorch_cpu -lc10 $(LIBS)

# What it has for GPUs, compiled alone. A libtorch without GPUs lacks one header, in which it would
# say how it was made.
build/examples/torch_cuda.o: examples/torch/torch_ddp.cpp Makefile
	@mkdir -p $(@D)/torch/c10/cuda/impl
	@touch $(@D)/torch/c10/cuda/impl/cuda_cmake_macros.h
	@$(TORCH_CXX) -DDP_USE_CUDA -isystem $(CUDA_HOME)/include -idirafter $(@D)/torch -c $< -o $@

build/examples/train_ggml: examples/ggml/train_ggml.c
build/examples/train_darknet: examples/darknet/train_darknet.c
build/examples/train_ggml: OF = $(if $(GGML),-isystem $(GGML)/include -L$(GGML)/lib \
    -Wl$(comma)-rpath$(comma)$(GGML)/lib) -lggml -lggml-base -lggml-cpu
build/examples/train_darknet: OF = -isystem $(DARKNET)/include $(DARKNET)/libdarknet.a
build/examples/train_ggml build/examples/train_darknet: build/examples/dp.o Makefile
	@mkdir -p $(@D)
	@echo "$(CC) $(filter %.c,$^)"
	@$(CC) -std=gnu11 -O2 $(WARNINGS) -MMD -MP -MT $@ -MF $@.d $(filter %.c %.o,$^) -o $@ $(OF) $(LIBS)

# For the Python that will load it.
torch-backend: build/torch/dp_c10d/_built.py
build/torch/python: FORCE
	@mkdir -p $(@D)
	@echo '$(TORCH_PYTHON)' >$@.new
	@cmp -s $@.new $@ || mv -f $@.new $@

build/torch/dp_c10d/_built.py: $(wildcard examples/torch/*.py examples/torch/dp_c10d/*.py) \
    examples/torch/c10d.cpp examples/torch/pyproject.toml $(HEADERS) build/torch/python
	$(TORCH_PYTHON) -m pip install -q --no-deps --upgrade --target build/torch ./examples/torch

$(CUDA_EXAMPLES): build/examples/dp_cuda.o
$(CUDA_EXAMPLES): CFLAGS_gcc += -DDP_USE_CUDA -isystem $(CUDA_HOME)/include
$(CUDA_EXAMPLES): LIBS += -L$(CUDA_HOME)/lib64 -Wl,--disable-new-dtags,-rpath,$(CUDA_HOME)/lib64 \
    -lcublas -lcudart -lnvrtc

$(BLAS_EXAMPLES): CFLAGS_gcc += -fopenmp
$(BLAS_EXAMPLES): LIBS += -lopenblas

FUZZ_NEEDS := $(HEADERS) $(wildcard tests/fuzz/*.h) Makefile build/config.mk

# dp.o has tests in it, which are registered and never run.
build/fuzz/test_main.o: tests/test_main.c $(FUZZ_NEEDS)
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CFLAGS_asan) $(TEST_DEFINES) -Dmain=main_of_tests -c $< -o $@

build/fuzz/%: tests/fuzz/%.c tests/fuzz/replay.c build/fuzz/test_main.o build/asan/dp.o $(FUZZ_NEEDS)
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CFLAGS_asan) $(TEST_DEFINES) $(filter %.c %.o,$^) -o $@ $(LIBS)

# Those that have the implementation in them have it once.
FUZZ_INSIDE := $(shell sed -n 's/^.define LLVMFuzzerTestOneInput //p' tests/fuzz/inside.c)
build/fuzz/inside.o: tests/fuzz/inside.c $(FUZZ_INSIDE:%=tests/fuzz/%.c) $(FUZZ_NEEDS)
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CFLAGS_asan) $(TEST_DEFINES) -c $< -o $@

$(FUZZ_INSIDE:%=build/fuzz/%): build/fuzz/%: tests/fuzz/replay.c build/fuzz/inside.o build/fuzz/test_main.o build/asan/dp.o $(FUZZ_NEEDS)
	$(CC) -std=c11 $(CFLAGS_asan) $(TEST_DEFINES) -DLLVMFuzzerTestOneInput=$* $(filter %.c %.o,$^) -o $@ $(LIBS)

build/libfuzzer/%: tests/fuzz/%.c tests/dp.c $(FUZZ_NEEDS)
	@mkdir -p $(@D)
	$(CLANG) -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
	    $(TEST_DEFINES) -DTEST_ALONE -DTEST_TRAIN $(STB_CFLAGS) $(filter %.c,$^) -o $@ $(LIBS)

-include $(wildcard build/*/*.d build/*/*/*.d build/*/*/*/*.d)
-include tests/bench/bench.mk
-include tests/faults/faults.mk
-include tests/slurm/slurm.mk
