# slurm.mk - make slurm-test: examples/slurm.sbatch on a Slurm of its own. See slurm.sh.

SLURM_PROGRAMS := build/slurm/train_images build/slurm/steps \
    $(if $(shell command -v mpicc.openmpi),build/slurm/steps_mpi)

slurm-test: $(SLURM_PROGRAMS) build/slurm/tools
	tests/slurm/slurm.sh build/slurm

.PHONY: slurm-test

build/slurm/tools: tests/get.sh
	tests/get.sh slurm $@

build/slurm/train_images: examples/train_images.c
build/slurm/steps build/slurm/steps_mpi: tests/slurm/steps.c
build/slurm/steps_mpi: private CC := mpicc.openmpi
build/slurm/steps_mpi: private CFLAGS_gcc += -DDP_USE_MPI

$(SLURM_PROGRAMS): $(HEADERS) Makefile build/config.mk
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CFLAGS_gcc) $(TEST_DEFINES) $(STB_CFLAGS) $(filter %.c,$^) -o $@ $(LIBS)
