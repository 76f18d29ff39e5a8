# faults.mk - what becomes of jobs when something happens to their processes, disk or network.
#
#   make faults [FAULTS=500] [FAULTS_SEED=0] [FAULTS_JOBS=2] [FAULTS_SCALE=1] [FAULTS_ONLY=word]
#
# So many trials from a seed on, some at a time, with time-outs stretched for a busy machine; those
# of whose kind or launcher FAULTS_ONLY is a part. Ends with a table. See faults.py.

FAULTS       ?= 500
FAULTS_SEED  ?= 0
FAULTS_JOBS  ?= $(shell nproc || echo 2)
FAULTS_SCALE ?= 1
FAULTS_ONLY  ?=
FAULTS_WITH  := plain $(foreach mpi,openmpi mpich,$(if $(shell command -v mpirun.$(mpi)),$(mpi)))
FAULTS_OWN    = $(filter %.c %.o,$^) -o $@ $(LIBS)

faults: $(FAULTS_WITH:%=build/faults/%/worker)
	@tests/faults/faults.py --trials $(FAULTS) --seed $(FAULTS_SEED) --jobs $(FAULTS_JOBS) \
	    --scale $(FAULTS_SCALE) $(FAULTS_ONLY:%=--only '%')

.PHONY: faults

# The library is in the objects of the tests, which are registered there and never run.
build/faults/test_main.o: tests/test_main.c tests/test.h Makefile build/config.mk
	@mkdir -p $(@D)
	$(CC) -std=c11 -O1 $(TEST_DEFINES) -Dmain=main_of_tests -c $< -o $@

build/faults/plain/worker: tests/faults/worker.c build/faults/test_main.o build/gcc/dp.o
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CFLAGS_gcc) $(TEST_DEFINES) $(STB_CFLAGS) $(FAULTS_OWN)

build/faults/openmpi/worker build/faults/mpich/worker: build/faults/%/worker: \
    tests/faults/worker.c build/faults/test_main.o build/%/dp.o
	@mkdir -p $(@D)
	$(CC_$*) -std=c11 $(CFLAGS_$*) $(TEST_DEFINES) $(STB_CFLAGS) $(FAULTS_OWN)
