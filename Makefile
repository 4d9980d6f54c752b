# Makefile of fsdp.h: a header needs no build; this builds its tests, examples and benchmarks.
# `make help` lists the targets. Your CC, CXX, CFLAGS, CPPFLAGS, LDFLAGS and LDLIBS are honoured,
# and drop none of the project's own flags. Another build directory: BUILD=dir.
# SPDX-License-Identifier: MIT

BUILD  ?= build
PREFIX ?= /usr/local
CFLAGS ?= -O2 -g
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
STD    ?= -std=c99
DEPS   ?= yes# no: `make test` installs nothing
FILTER ?=# of `make test`: names with this text, or a glob
GATES  ?=# of `make check`: gates whose names begin so (tools/check.sh), and variants (VARIANTS)
export FSDP_GOLDEN_DIR ?= tests/golden
export FSDP_BUILD := $(BUILD)

# Tests whose results must not depend on the compiler's liberties, run again with -Ofast and more.
BIT_TESTS      ?= test_dtype test_shard test_train test_optim test_rounding conformance
VALGRIND_TESTS ?= test_train:W=2 test_optim:optim.* test_memory:W=2 test_safetensors:safetensors.[!lm]*# slow enough
SINGLE_TESTS   ?= test_features test_shard test_spawn # with the headers of make single
# Between them they run all that threads of ours do at the same time.
TSAN_TESTS     ?= conformance test_agree test_delays test_extension test_faults \
                  test_fully_shard_comm test_plan test_shm_faults test_spawn test_store \
                  test_store_trust
# make quick leaves these out: what takes most of the time, and what other tests see as well.
SLOW := long_*:fully_shard_compile.*:fully_shard_training.train_parity*:fully_shard_mixed_precision.dtypes*:replicate_with*:ddp_tp.*:replicate_faults.*:replicate_training.*:replicate_mixed_precision.*:*.*/W=[45]*:gpt.*:resume.*:find_nccl.*:budget.*:train.every_*:norm.every_*:exhaustive.*:delays.*:golden_train.*:plan.leave*:cluster.*:extension.more*:shard.random*:reset.*:checkpoint.reshard*:checkpoint_slow.*:norm.slices:faults.*lanes:shm_faults.rank_missing*:store_launcher.late*:trust.stopped_launcher*:fully_shard_training.partial*:fully_shard_training.gradient*:checkpoint_faults.*:plan_random.*:shm_faults.every_alloc*:shm_faults.crossed*:shm_faults.pairs_that*:store_strangers.job*:store_strangers.bad*:store_fuzz.*:freeze.between*:fsdprun.*term*:fsdprun.a_stopped*:trust.rogue*:trust.relay*:harness.timeout*:dtensor.random*:dtensor.pytorchs*:dtensor_errors.a_rank_leaves*:golden_tp.*:sim_store.each*:sweep.*:places.*:hsdp.training/2x2x2*:fully_shard_training.[23]d*:fully_shard_memory.*:dtensor_tp.parity/hsdp*:store_keys.large*:api.random*:examples.mlp:dtensor_tp.features*:mesh.random*:fully_shard_comm.*_fp*:grad_scaler.gradient*:dtensor_faults.rank_stops*:streams.every*:plan_text.round*:fully_shard_mixed_precision.*:fully_shard_frozen.mixed*:memory.prediction/W=3

WARN  := -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wcast-qual -Wundef \
         -Wcast-align -Wvla -Wdouble-promotion -Wformat=2 -Wswitch-enum
CWARN := -Wstrict-prototypes -Wmissing-prototypes
export WARN CWARN CC CXX SINGLE_TESTS

# SAN=asan or SAN=tsan: into a build directory of its own, by a make of its own (check-san).
# The gates spend their time in the compiler: asan takes half as long without optimization.
SAN_asan := -fsanitize=address,undefined,float-cast-overflow -O0
SAN_tsan := -fsanitize=thread -O1
SANFLAGS := $(if $(SAN),$(SAN_$(SAN)) -fno-sanitize-recover=all -fno-omit-frame-pointer -g)

comma := ,
HEADERS  := $(wildcard fsdp.h) $(filter-out fsdp.h,$(wildcard fsdp*.h))
PARTS    := $(wildcard core/*.h plan/*.h dtensor/*.h checkpoint/*.h safetensors/*.h \
              backends/*.h) # what they include
# Those of one backend are built with it alone: GLOO_TESTS, STUB_TESTS.
ALL_TESTS := $(notdir $(basename $(wildcard tests/test_*.c tests/private/test_*.c \
               tests/conformance.c)))
ONLY_STUB := $(filter test_stubs test_cuda_kernels test_gpt_cuda test_gpu_first test_nccl%,$(ALL_TESTS))
TESTS    := $(addprefix $(BUILD)/tests/,$(filter-out test_gloo% $(ONLY_STUB),$(ALL_TESTS)))
PROBES   := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/probe_*.c))
PYTESTS  := $(wildcard tests/test_*.py)
EXAMPLES := $(patsubst examples/%.c,$(BUILD)/examples/%,$(wildcard examples/*.c))
BENCHES  := $(patsubst bench/%.c,$(BUILD)/bench/%,$(filter-out bench/bench_gpu.c,\
              $(wildcard bench/bench_*.c)))
GPT      := $(if $(GLOO)$(NCCL),$(BUILD)/examples/train_gpt,examples/gpt/train_gpt)
FSDPRUN  := $(patsubst %.c,%,$(wildcard tools/fsdprun.c))
TOOLS    := $(patsubst %.c,%,$(wildcard tools/fsdp*.c))# launcher, checkpoints
SHARED   := $(if $(HEADERS),$(BUILD)/libfsdp.so)
VERSION   = $(shell awk '/^.define FSDP_VERSION_(MAJOR|MINOR|PATCH)/ \
              {v = v s $$3; s = "."} END {print v}' fsdp.h)

# Gloo, for several hosts: GLOO=yes compiles that backend in beside shm, and is how `make gloo` and
# `make test` build their second variant, in $(BUILD)/gloo. GLOO_HOME: where the library is.
GLOO_FLAGS := $(if $(GLOO_HOME),-I$(GLOO_HOME)/include)
GLOO_LIBS  := $(if $(GLOO_HOME),-L$(GLOO_HOME)/lib -Wl$(comma)-rpath$(comma)$(GLOO_HOME)/lib) \
              -lgloo -lstdc++
HAVE_GLOO   = $(shell echo '\#include <gloo/transport/tcp/device.h>' | \
                $(CXX) -E -x c++ $(GLOO_FLAGS) - >/dev/null 2>&1 && echo yes)
ifeq ($(GLOO),yes)
GLOO_OBJ := $(BUILD)/fsdp_gloo.o
RING_OBJ := $(BUILD)/gloo_ring.o
CPPFLAGS += -DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO
LDLIBS   += $(GLOO_OBJ) $(GLOO_LIBS)
endif
# Tests that run a second time over Gloo: those with several ranks on a real backend; behind a colon
# which of their tests, where all of them would only take longer (or 128 ranks).
GLOO_TESTS ?= conformance:*/gloo/*:-*W=[45]*:-*/gloo/threads/W=[12] test_agree test_checkpoint:checkpoint.roundtrip/a* test_dtensor:*all_pairs*:*begin_and_wait*:dtensor_errors.* \
              test_compress test_edges test_features test_fully_shard_comm:-*_fp?? test_fully_shard_init \
              test_fully_shard_training:-*.3d:-*.2d_*:-*.partial_group*:-*.gradient_accumulation test_gloo test_gloo_faults test_golden_tp:*inline test_launch:launch.sub_worlds* test_mesh:-*random* \
              test_norm:*every_assignment/4 test_plan:plan.net*:plan_errors.* test_process \
              test_replicate test_replicate_faults test_scaler test_spawn test_sweep test_uneven
GLOO_RUNS     := $(addprefix $(BUILD)/gloo/tests/,$(GLOO_TESTS))
GLOO_PROGRAMS := $(sort $(foreach t,$(GLOO_RUNS),$(firstword $(subst :, ,$t))))

# CUDA and NCCL, for GPUs: NCCL=yes compiles that backend in beside shm, with what find_nccl.sh
# found, and is how `make nccl` builds in $(BUILD)/nccl. NCCL=stub takes tests/stubs for both, and
# kernels as loops: the third variant of `make test`, in $(BUILD)/stub, which needs no CUDA.
# For which GPUs find_nccl.sh says, or NVCC_ARCH, flags or a name for -arch (sm_90, native).
NVCC_FLAGS ?= -O3
ifneq ($(NCCL),)
CUDA_OBJ := $(BUILD)/fsdp_cuda.o
CUDA_GPT := $(patsubst examples/gpt/%.cu,$(BUILD)/examples/%_cuda,$(wildcard examples/gpt/*.cu))
CPPFLAGS += -DFSDP_BACKEND_SHM -DFSDP_BACKEND_NCCL
# Programs in CUDA have no use for ranks without GPUs.
CUDA_ONLY = $(filter-out -DFSDP_BACKEND_SHM,$(CPPFLAGS))
endif
ifeq ($(NCCL),yes)
NCCL_MK  := $(BUILD)/nccl.mk
include $(NCCL_MK)
CPPFLAGS += $(NCCL_FLAGS) $(CUDA_FLAGS)
CUDA_GPT := $(if $(CUBLAS_LIBS),$(CUDA_GPT))# without cuBLAS it is left out
LDLIBS   += $(CUDA_OBJ) $(NCCL_LIBS) $(CUDA_LIBS) -lstdc++
CUDA_CC   = $(NVCC) -std=c++14 $(if $(filter -%,$(NVCC_ARCH)),,-arch=)$(NVCC_ARCH) $(NVCC_FLAGS) -I. $(CUDA_ONLY) $(CUBLAS_FLAGS) \
            -Xcompiler -fPIC,-Wall
CUDA_LINK = $(CXX) -o $@ $@.o $(LDFLAGS) $(NCCL_LIBS) $(CUBLAS_LIBS) $(CUDA_LIBS) -pthread -lm
endif
ifeq ($(NCCL),stub)
STUB_OBJ := $(patsubst tests/stubs/%.c,$(BUILD)/stubs/%.o,$(wildcard tests/stubs/*.c))
CUDA_OBJ += $(STUB_OBJ)
CPPFLAGS += -Itests/stubs
LDLIBS   += $(CUDA_OBJ) -lstdc++
CUDA_CC   = $(CXX) -x c++ -std=c++11 -Wall -Wextra -I. $(CUDA_ONLY) $(CXXFLAGS) $(SANFLAGS) \
            $(if $(SAN),-O1,-O2) -g -ffp-contract=off
CUDA_LINK = $(CXX) $(SANFLAGS) -o $@ $@.o $(LDFLAGS) $(CUDA_OBJ) -pthread -lm
endif
# In their own mode; then those that run again on this backend, in one where the host may look at
# data behind any call, and where disagreements and races of streams are found. Behind a colon as
# above: not those that count host memory, compare with bits of another order of sums, or need more
# ranks than there are devices.
STUB_TESTS ?= $(ONLY_STUB)
NCCL_TESTS ?= test_agree test_cast:-*out_of_memory test_checkpoint:checkpoint.roundtrip*:*freeze_thaw* \
              test_checkpoint_train:checkpoint_async.values* test_compress test_dtensor:*all_pairs*:*begin_and_wait* test_edges test_features:-*offload.same_bits:-*freeze.between_steps \
              test_fully_shard_comm:-*_fp?? test_fully_shard_init \
              test_fully_shard_training:-*tp_ep:-*.3d:-*.2d_*:-*.partial_group*:-*.gradient_accumulation test_plan:plan.net*:plan_kinds.* test_process:forks.*:descriptors.closed/* \
              test_replicate test_replicate_faults test_rounding test_scaler
# Ranks that share a GPU, as `make gpu-test` runs them: processes, beside which streams go on.
ONE_GPU    := FSDP_STUB_DEVICES=1 NCCL_HOSTID=host
NCCL_ENV   := FSDP_BACKEND=nccl FSDP_CUDA_MANAGED=1 FSDP_NCCL_CHECK=1
export STUB_TESTS NCCL_TESTS
STUB_RUNS     := $(addprefix $(BUILD)/stub/tests/,$(STUB_TESTS))
NCCL_RUNS     := $(addprefix $(BUILD)/stub/tests/,$(NCCL_TESTS))
STUB_PROGRAMS := $(sort $(foreach t,$(STUB_RUNS) $(NCCL_RUNS),$(firstword $(subst :, ,$t)))) \
                 $(BUILD)/stub/tests/conformance
GPU_PROGRAMS  := $(addprefix $(BUILD)/nccl/tests/,test_gpu_first test_cuda_kernels conformance \
                   $(sort $(foreach t,$(NCCL_TESTS),$(firstword $(subst :, ,$t)))))

# For the gpt example and the benchmarks of steps, where their own loops are not as fast: on x86-64 they
# are, and OpenBLAS takes its kernels without AVX on processors that it does not know.
GPT_BLAS := $(if $(filter-out x86_64,$(shell uname -m)),$(shell pkg-config --exists openblas 2>/dev/null && \
              echo -DGPT_USE_BLAS $$(pkg-config --cflags --libs openblas)))

# V=1 shows the commands.
Q := $(if $(V),,@)
COMPILE   = $(CC) $(STD) $(WARN) $(CWARN) -I. -Itests $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) -MMD -MP \
            -MF $@.d -o $@
BUILD_ONE = $(COMPILE) $< $(filter %/library.o,$^) $(LDFLAGS) -pthread $(LDLIBS) -lm

.PHONY: all tests examples single dist errors floors plan-svg bench-report gpt-cuda bench bench-gloo run gloo run-gloo nccl gpu-test \
        gpu-bench quick test nightly torchrun golden check check-san shared deps install uninstall format clean help quiet-deps
all: examples tests $(TOOLS) ## examples, tests and tools
tests: $(TESTS) $(PROBES)
gpt-cuda: $(CUDA_GPT)
examples: $(EXAMPLES) $(GPT) ## build/examples/* and examples/gpt/train_gpt
single: ## build/single/*.h: each header as one file, to drop into a program
	tools/amalgamate.py $(BUILD)/single
# Names are sorted and times are the commit's: a commit gives the same bytes wherever it is packed.
dist: DIST = fsdp-$(VERSION)
dist: ## build/fsdp-VERSION.tar.gz, a release: the files of the repository, and single/
	@test -e .git || { echo "make dist needs a clone: it packs the files that git lists"; exit 1; }
	@git diff --quiet HEAD || echo "note: $(DIST) has changes that are not committed"
	rm -rf $(BUILD)/dist
	mkdir -p $(BUILD)/dist/$(DIST)
	git ls-files -z | xargs -0 cp --parents -t $(BUILD)/dist/$(DIST)
	tools/amalgamate.py $(BUILD)/dist/$(DIST)/single
	tar -c -I 'gzip -9n' -f $(BUILD)/$(DIST).tar.gz --format=gnu --sort=name --owner=0 --group=0 \
	    --numeric-owner --mode=u=rwX,go=rX --mtime=@$$(git log -1 --format=%ct) \
	    -C $(BUILD)/dist $(DIST)
errors: ## ids, statuses and texts in docs/errors.md, from the sources
	tools/errors -o docs/errors.md
floors: ## docs/floors.svg, which file stands on which
	tools/floors -o docs/floors.svg
plan-svg: $(BUILD)/examples/07_plan ## docs/plan.svg, the picture of a plan
	env -u FSDP_LANES -u FSDP_BACKEND $(BUILD)/examples/07_plan $(BUILD)/plan.txt
	tools/plan_svg -o docs/plan.svg $(BUILD)/plan.txt
bench-report: ## docs/bench_*.svg and memory.svg, pictures of the documents, from bench/results/*.csv
	tools/bench_report --write
shared: $(SHARED) ## build/libfsdp.so, for bindings of other languages

$(BUILD)/fsdp_gloo.o: backends/fsdp_gloo.cc backends/fsdp_gloo_shim.h Makefile | $(BUILD)
	@echo "  CXX $@"
	$Q$(CXX) -Wall -Wextra $(GLOO_FLAGS) $(CXXFLAGS) -O2 -fPIC -c -o $@ $<
$(BUILD)/nccl.mk: tools/find_nccl.sh
	@tools/find_nccl.sh -o $@
$(BUILD)/fsdp_cuda.o: backends/fsdp_cuda.cu $(wildcard backends/fsdp_cuda*.h) fsdp.h \
    core/float.h core/macros.h core/backend.h Makefile \
    $(NCCL_MK) | $(BUILD)
	@echo "  NVCC $@"
	$Q$(CUDA_CC) -c -o $@ $<
$(BUILD)/stubs/%.o: tests/stubs/%.c $(wildcard tests/stubs/*.h) fsdp.h $(PARTS) Makefile | $(BUILD)/stubs
	@echo "  CC $@"
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. -Itests/stubs $(CFLAGS) $(SANFLAGS) -c -o $@ $<
$(BUILD)/examples/%_cuda: examples/gpt/%.cu $(wildcard examples/gpt/*.[ch] backends/*.cu) \
    $(HEADERS) $(PARTS) $(CUDA_OBJ) Makefile | $(BUILD)/examples
	@echo "  NVCC $@"
	$Q$(CUDA_CC) -c -o $@.o $<
	$Q$(CUDA_LINK)
# Tests are linked with one object, the library; those in private/ include what it is made of. Unless
# you give CFLAGS, the library is optimized once, and all else compiled fast: half of the time is gcc's.
# Over Gloo and on stand-ins tests mostly wait.
LEAN := $(if $(filter file,$(origin CFLAGS)),$(if $(GLOO)$(NCCL),-O0,-O1) -g1)
$(BUILD)/tests/%: private CFLAGS += $(LEAN)
$(BUILD)/examples/%: private CFLAGS += $(if $(GLOO)$(NCCL),$(LEAN))
LIBRARY := $(BUILD)/tests/library.o
$(LIBRARY): private CFLAGS += $(if $(GLOO)$(NCCL)$(SAN)$(filter-out file,$(origin CFLAGS)),,-O2)
$(LIBRARY): tests/library.c Makefile | $(BUILD)/tests
	@echo "  CC $@"
	$Q$(COMPILE) -c $<
$(BUILD)/tests/%: tests/%.c Makefile $(LIBRARY) $(GLOO_OBJ) $(CUDA_OBJ) | $(BUILD)/tests
	@echo "  CC $@"
	$Q$(BUILD_ONE)
$(BUILD)/tests/%: tests/private/%.c Makefile $(GLOO_OBJ) $(CUDA_OBJ) | $(BUILD)/tests
	@echo "  CC $@"
	$Q$(BUILD_ONE)
$(BUILD)/examples/%: examples/%.c Makefile $(GLOO_OBJ) $(CUDA_OBJ) | $(BUILD)/examples
	@echo "  CC $@"
	$Q$(BUILD_ONE)
$(BUILD)/gloo_ring.o: bench/gloo_ring.cc bench/gloo_ring.h Makefile | $(BUILD)
	@echo "  CXX $@"
	$Q$(CXX) -Wall -Wextra -I. $(GLOO_FLAGS) $(CXXFLAGS) -O3 -c -o $@ $<
$(BUILD)/bench/%: bench/%.c Makefile $(GLOO_OBJ) $(CUDA_OBJ) | $(BUILD)/bench
	@echo "  CC $@"
	$Q$(BUILD_ONE)
$(BUILD)/bench/bench_comm: private LDLIBS := $(RING_OBJ) $(LDLIBS)
$(BUILD)/bench/bench_comm: $(RING_OBJ)
$(BUILD)/bench/bench_step $(BUILD)/bench/bench_tp_step $(BUILD)/bench/bench_replicate: \
    private CFLAGS += -O3 -march=native -ffp-contract=fast
$(BUILD)/bench/bench_step $(BUILD)/bench/bench_tp_step: private LDLIBS := $(GPT_BLAS) $(LDLIBS)
tools/fsdprun tools/fsdpck: %: %.c $(HEADERS) $(PARTS) Makefile | $(BUILD)
	@echo "  CC $@"
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. $(CPPFLAGS) $(CFLAGS) -o $@ $< $(LDFLAGS) -pthread -lm
# The trainer for this processor, beside the library, so that both are compiled at the same time.
GPT_OBJS := $(addprefix $(BUILD)/examples/,gpt_trainer.o gpt_library.o)
$(GPT_OBJS): $(wildcard examples/gpt/*.[ch]) $(HEADERS) $(PARTS) Makefile | $(BUILD)/examples
$(BUILD)/examples/gpt_trainer.o:
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. $(CPPFLAGS) $(CFLAGS) -O3 -march=native -ffp-contract=fast \
	    -DGPT_LIBRARY_APART $(GPT_BLAS) -c -o $@ examples/gpt/train_gpt.c
$(BUILD)/examples/gpt_library.o: $(BUILD)/libfsdp.c
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. $(CPPFLAGS) $(CFLAGS) -c -o $@ $<
examples/gpt/train_gpt $(BUILD)/examples/train_gpt: $(GPT_OBJS) $(GLOO_OBJ) $(CUDA_OBJ)
	@echo "  CC $@"
	$Q$(CC) $(CFLAGS) -o $@ $(GPT_OBJS) $(LDFLAGS) -pthread $(GPT_BLAS) $(LDLIBS) -lm
$(BUILD)/libfsdp.c: $(HEADERS) Makefile | $(BUILD)
	@printf '#define FSDP_IMPLEMENTATION\n' >$@
	@printf '#include "%s"\n' $(HEADERS) >>$@
$(BUILD)/libfsdp.so: $(BUILD)/libfsdp.c $(PARTS)
	@echo "  CC $@"
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. $(CPPFLAGS) $(CFLAGS) -fPIC -shared -o $@ $< $(LDFLAGS) \
	    -pthread $(LDLIBS) -lm
$(BUILD) $(BUILD)/tests $(BUILD)/examples $(BUILD)/bench $(BUILD)/stubs:
	@mkdir -p $@
-include $(wildcard $(BUILD)/*/*.d)

run: ## train a small GPT on 4 ranks; 3 ranks go on from its checkpoint
	@$(MAKE) -s -j$(JOBS) --no-print-directory $(GPT)
	@rm -rf $(BUILD)/run
	examples/gpt/train_gpt --ranks 4 --save $(BUILD)/run
	examples/gpt/train_gpt --ranks 3 --save $(BUILD)/run --resume --steps 1010

gloo: $(FSDPRUN) ## the examples with the Gloo backend, in build/gloo/examples
	@test -n "$(HAVE_GLOO)" || \
	    { echo "no Gloo: make deps installs libgloo-dev; or GLOO_HOME=..."; exit 1; }
	@$(MAKE) -s -k -j$(JOBS) --no-print-directory BUILD=$(BUILD)/gloo GLOO=yes examples
run-gloo: gloo ## train a small GPT over TCP, on 4 ranks of this host
	FSDP_BACKEND=gloo FSDP_GLOO_NEAR=1 tools/fsdprun -n 4 $(BUILD)/gloo/examples/train_gpt --steps 300

# What is missing, GPU included, find_nccl.sh tells at once.
MAKE_NCCL = $(MAKE) -s -j$(JOBS) --no-print-directory BUILD=$(BUILD)/nccl NCCL=yes
nccl: $(FSDPRUN) ## for GPUs: examples, conformance and the GPT in CUDA, in build/nccl
	@tools/find_nccl.sh -o $(BUILD)/nccl/nccl.mk
	@$(MAKE_NCCL) examples gpt-cuda $(BUILD)/nccl/tests/conformance
gpu-test: $(FSDPRUN) ## the tests on this machine's GPU; PART=first|kernels|parity|ranks|... only those
	@tools/find_nccl.sh -g -o $(BUILD)/nccl/nccl.mk
	@$(MAKE_NCCL) gpt-cuda $(GPU_PROGRAMS) $(BUILD)/nccl/bench/bench_gpu
	@$(MAKE) -s --no-print-directory examples/gpt/train_gpt
	@FSDP_BUILD=$(BUILD)/nccl tools/gpu_test.sh $(PART)
gpu-bench: $(FSDPRUN) ## numbers of this machine's GPU, into build/nccl/*.csv
	@tools/find_nccl.sh -g -o $(BUILD)/nccl/nccl.mk
	@$(MAKE_NCCL) gpt-cuda $(BUILD)/nccl/bench/bench_gpu
	@FSDP_BUILD=$(BUILD)/nccl tools/gpu_bench.sh

# ---- tests ---------------------------------------------------------------------------------------

# A variant of the tests: variables of a make of its own, what is built, and words for run_tests.sh.
GOALS_shm := tests examples shared $(TOOLS)
RUN_shm   := FSDP_BUILD=$(BUILD) $(TESTS)
MAKE_gloo  := BUILD=$(BUILD)/gloo GLOO=yes
GOALS_gloo := examples $(GLOO_PROGRAMS)
RUN_gloo   := FSDP_BUILD=$(BUILD) FSDP_BACKEND=gloo $(GLOO_RUNS)
MAKE_stub  := BUILD=$(BUILD)/stub NCCL=stub
GOALS_stub := gpt-cuda $(STUB_PROGRAMS)
RUN_stub   := FSDP_BUILD=$(BUILD)/stub $(STUB_RUNS) -- FSDP_BUILD=$(BUILD) $(NCCL_ENV) \
              $(BUILD)/stub/tests/conformance:*/nccl/*:-*W=[45]* FSDP_STUB_CHECKS=1 $(NCCL_RUNS) \
              -- FSDP_BUILD=$(BUILD) $(NCCL_ENV) $(ONE_GPU) $(addprefix $(BUILD)/stub/tests/,test_agree test_cast:-*out_of_memory test_edges)

# Three ranks meet in all the ways in which more do, where a test runs with both. What takes longest
# runs under one of the sanitizers, or under none: arithmetic, and what the race checker of the stubs
# has seen.
SLOWER  := TEST_TIMEOUT_MULT=10
FEW := -*W=[45]*
NO_ASAN := test_budget test_cluster test_examples test_find_nccl test_gpt test_harness# other programs
# Arithmetic of trainings, faults, which mostly wait, and delays, which tsan sees: at night.
NIGHT   := test_delays test_dtensor_tp test_fsdpck test_fully_shard_dtensor test_fully_shard_training test_fully_shard_compile test_fully_shard_mixed_precision test_golden_tp \
           test_golden_train test_norm test_dtype test_plan_random test_replicate_faults test_replicate_training test_replicate_with_compiler test_spec \
           test_store test_store_trust test_train
ASAN_TESTS ?= $(filter-out $(NO_ASAN) $(NIGHT),$(TESTS:$(BUILD)/tests/%=%))
TSAN_ENV   := TSAN_OPTIONS=suppressions=tests/tsan.supp
OFAST      := STD=-std=gnu11 'CFLAGS=-Ofast -march=native'
MAKE_asan  := BUILD=$(BUILD)/asan SAN=asan
GOALS_asan := $(ASAN_TESTS:%=$(BUILD)/asan/tests/%)
FEWER      := $(FEW):-checkpoint_faults.[dkp]*:-checkpoint.reshard*:-checkpoint_slow.*:-extension.more_records_than_events:-route.every_combination:-shard.random_units:-*.gradient_accumulation:-*.training_memory:-streams.*_is_*:-*/wide:-norm.slices:-*DIM=*:-optim_device.same_bits*:-plan.leave_at_every_call/[fs]*:-memory.prediction/W=[23]:-dtensor.all_pairs*:-dtensor_faults.rank_stops*_[023]*:-reset.behind*:-freeze.between*:-offload.same_bits:-prefetch.depth*
RUN_asan   := $(SLOWER) FSDP_BUILD=$(BUILD)/asan $(GOALS_asan:%=%:$(FEWER))
MAKE_tsan  := BUILD=$(BUILD)/tsan SAN=tsan
GOALS_tsan := $(TSAN_TESTS:%=$(BUILD)/tsan/tests/%)
FEWEST_PLANS := -plan.net*:-plan.leave*:-plan_kinds.[cefls]*:-plan_kinds.*replicas:-plan_errors.[acdlnst]*
FEWEST     := $(FEW):-delays.*N=4*:-*.gradient_accumulation:-*.partial_group*:-*.reshard_toggle:-*.activation_*:-faults.host_allocations*:-extension.more_records_than_events:-conformance.*/processes/*:-delays.planned_on_streams/bf*:-delays.planned_on_streams/f64:-delays.planned_on_streams/f16*:-faults.reset*:-faults.operations/*/W=3/lanes:$(FEWEST_PLANS)
RUN_tsan   := $(SLOWER) $(TSAN_ENV) FSDP_BUILD=$(BUILD)/tsan $(GOALS_tsan:%=%:$(FEWEST))
MAKE_gloo_asan  := BUILD=$(BUILD)/gloo_asan GLOO=yes SAN=asan
GOALS_gloo_asan := $(BUILD)/gloo_asan/tests/conformance
RUN_gloo_asan   := $(SLOWER) $(GOALS_gloo_asan):*gloo/processes/W=3:*gloo/mixed/processes*
MAKE_gloo_tsan  := BUILD=$(BUILD)/gloo_tsan GLOO=yes SAN=tsan
GOALS_gloo_tsan := $(BUILD)/gloo_tsan/tests/conformance
RUN_gloo_tsan   := $(SLOWER) $(TSAN_ENV) $(GOALS_gloo_tsan):*gloo/threads/W=3:*gloo/mixed/threads*
MAKE_nccl_asan  := BUILD=$(BUILD)/nccl_asan NCCL=stub SAN=asan
GOALS_nccl_asan := $(patsubst %,$(BUILD)/nccl_asan/tests/%,conformance \
                     $(filter-out test_gpt_cuda %_faults,$(STUB_TESTS)))# faults mostly wait
FEWER_nccl      := -*many_tiles:-nccl.leave_out*:-nccl.no_races*:-nccl.faults*:-nccl.same_bits/[a-z]*:-nccl.registrations*:-nccl.own_stream*:-copy.every_row_to*
FEWEST_nccl     := $(FEW):-stub_graph.forbids*
RUN_nccl_asan   := $(SLOWER) FSDP_BUILD=$(BUILD)/nccl_asan \
                   $(patsubst %,%:$(FEWER_nccl),$(filter-out \
                     %/conformance,$(GOALS_nccl_asan))) \
                   $(NCCL_ENV) $(BUILD)/nccl_asan/tests/conformance:*nccl/processes/W=3
MAKE_nccl_tsan  := BUILD=$(BUILD)/nccl_tsan NCCL=stub SAN=tsan
GOALS_nccl_tsan := $(patsubst %,$(BUILD)/nccl_tsan/tests/%,test_stubs conformance)
RUN_nccl_tsan   := $(SLOWER) $(TSAN_ENV) FSDP_BUILD=$(BUILD)/nccl_tsan $(BUILD)/nccl_tsan/tests/test_stubs:$(FEWEST_nccl) \
                   $(NCCL_ENV) $(BUILD)/nccl_tsan/tests/conformance:*nccl/threads/W=3
MAKE_ofast  := BUILD=$(BUILD)/ofast CC=gcc $(OFAST)
GOALS_ofast := $(BIT_TESTS:%=$(BUILD)/ofast/tests/%)
RUN_ofast   := FSDP_BUILD=$(BUILD)/ofast $(GOALS_ofast:%=%:$(FEW))
MAKE_clang_ofast  := BUILD=$(BUILD)/clang_ofast CC=clang $(OFAST)
GOALS_clang_ofast := $(BIT_TESTS:%=$(BUILD)/clang_ofast/tests/%)
RUN_clang_ofast   := FSDP_BUILD=$(BUILD)/clang_ofast $(GOALS_clang_ofast)

# Gloo where it is installed; else what says so.
VARIANTS  = ofast nccl_asan nccl_tsan $(if $(HAVE_GLOO),gloo_asan gloo_tsan) tsan asan# long programs first
TESTED    = stub $(if $(HAVE_GLOO),gloo) shm
WITHOUT_GLOO = $(if $(HAVE_GLOO),,skip:gloo:no-libgloo-dev)
CHOSEN    = $(filter $(if $(GATES),$(GATES),%),$(VARIANTS))
WORDS     = $(foreach v,$1,-- $(RUN_$v:%='%'))
CHECK_SH  = $(shell tools/check.sh --list $1 $(filter-out $(VARIANTS),$(GATES)))
GATES_OF  = $(if $(GATES),$(if $(filter-out $(VARIANTS),$(GATES)),$(call CHECK_SH,$1)),$(call CHECK_SH,$1))
BUILD_ALL = $(if $(strip $1),-@$(MAKE) -s -k -j$(JOBS) --no-print-directory $(addprefix build-,$1))
build-%:
	@$(MAKE) $(MAKE_$*) $(GOALS_$*)

quick: ## the tests over shared memory, without the slowest: under a minute from a built tree
	$(call BUILD_ALL,shm)
	@tools/run_tests.sh --without='-$(subst :,:-,$(SLOW))' $(call WORDS,shm)
test: quiet-deps ## every test, over Gloo and on stubs of CUDA and NCCL too, without suites long_
	$(call BUILD_ALL,$(TESTED))
	@tools/run_tests.sh --without='-long_*' --ran=$(BUILD)/tests.ran $(if $(FILTER),'--filter=$(FILTER)') \
	    FSDP_BUILD=$(BUILD) $(PYTESTS) $(call WORDS,$(TESTED)) -- $(WITHOUT_GLOO)
golden: ## the tests against recorded PyTorch results, in $FSDP_GOLDEN_DIR
	-@$(MAKE) -s -k -j$(JOBS) --no-print-directory tests
	@tools/run_tests.sh --filter=golden $(TESTS)
check: quiet-deps ## every gate: compilers, symbols, sanitizers, documentation, ...
	-@$(MAKE) -s -k -j$(JOBS) --no-print-directory examples $(FSDPRUN)
	$(call BUILD_ALL,$(CHOSEN))
	@tools/run_tests.sh --without='-long_*' $(patsubst %,gate:%,$(call GATES_OF,ci)) \
	    $(call WORDS,$(CHOSEN))
check-san: ## only the sanitizers
	@$(MAKE) --no-print-directory check GATES='$(filter %san,$(VARIANTS))'
# Half a day's worth: suites long_, every language and version, valgrind, the mutations.
VALGRIND := valgrind -q --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite \
            --trace-children=yes
LONG_gloo = $(if $(HAVE_GLOO),-- FSDP_BUILD=$(BUILD) FSDP_BACKEND=gloo \
            $(patsubst %,'$(BUILD)/gloo/tests/%:long_*',test_gloo test_gloo_faults test_sweep),$(WITHOUT_GLOO))
NIGHT_NCCL := test_golden_train:-*replay/clip test_fully_shard_training:-*tp_ep test_replicate_training test_dtensor test_dtensor_compile:-*W=16 test_dtensor_tp:-*processes* test_golden_tp \
              test_fully_shard_compile test_fully_shard_mixed_precision:-*casts_are_fused* test_fully_shard_others \
              test_replicate_with_compiler:-*DIM=*
NIGHT_GLOO := test_golden_train test_fully_shard_training test_mesh test_dtensor test_dtensor_compile test_dtensor_tp test_golden_tp test_fully_shard_compile \
              test_fully_shard_mixed_precision test_fully_shard_others test_replicate_training test_replicate_with_compiler
nightly: quiet-deps ## what test and check leave out, and the mutations: hours
	$(call BUILD_ALL,$(TESTED) clang_ofast)
	@tools/with_torchrun.sh $(BUILD)/venv tools/run_tests.sh $(patsubst %,gate:%,$(call CHECK_SH,nightly)) \
	    $(call WORDS,clang_ofast) -- FSDP_BUILD=$(BUILD) FSDP_LONG=1 tests/test_package.py \
	    -- FSDP_BUILD=$(BUILD) $(TESTS:%='%:long_*') $(LONG_gloo) \
	    -- FSDP_BUILD=$(BUILD)/stub $(patsubst %,'$(BUILD)/stub/tests/%:long_*',test_nccl test_nccl_faults) \
	    -- $(SLOWER) $(foreach t,$(VALGRIND_TESTS),'$(VALGRIND) $(BUILD)/tests/$(subst :, --filter=,$t):-long_*')
	@$(MAKE) -s --no-print-directory build-stub NCCL_TESTS='$(NIGHT_NCCL)'
	$(if $(HAVE_GLOO),@$(MAKE) -s --no-print-directory build-gloo GLOO_TESTS='$(NIGHT_GLOO)')
	@tools/run_tests.sh --without='-long_*' FSDP_BUILD=$(BUILD) $(NCCL_ENV) \
	    $(NIGHT_NCCL:%=$(BUILD)/stub/tests/%) $(ONE_GPU) $(NCCL_RUNS) $(if $(HAVE_GLOO),-- FSDP_BUILD=$(BUILD) FSDP_BACKEND=gloo \
	    $(NIGHT_GLOO:%=$(BUILD)/gloo/tests/%))
	@$(MAKE) --no-print-directory check GATES='asan nccl_asan tsan ofast' FEW= FEWER= FEWEST= FEWER_nccl= FEWEST_nccl= \
	    ASAN_TESTS='$(ASAN_TESTS) $(NIGHT)' \
	    TSAN_TESTS='$(TSAN_TESTS) test_features test_fully_shard_training test_memory test_replicate test_train'
	@tools/mutate

torchrun: $(FSDPRUN) gloo ## programs under a real torchrun; where there is none, installs one into build/venv
	@$(MAKE) -s --no-print-directory $(BUILD)/tests/test_cluster $(BUILD)/examples/01_hello
	@tools/with_torchrun.sh $(BUILD)/venv tools/run_tests.sh \
	    FSDP_BUILD=$(BUILD) '$(BUILD)/tests/test_cluster:long_cluster.torchrun*'

# Over Gloo where it is; beside PyTorch where that is, too.
PYTHON ?= python3
bench: $(BENCHES) ## build the benchmarks and run each
	@set -e; for b in $(BENCHES); do $$b; done
bench-gloo: ## the same over Gloo, and beside PyTorch where it is installed
	@test -n "$(HAVE_GLOO)" || { echo "skipped: no Gloo (make deps)"; exit 1; }
	@$(MAKE) -s --no-print-directory BUILD=$(BUILD)/gloo GLOO=yes \
	    $(addprefix $(BUILD)/gloo/bench/,bench_comm bench_plan bench_replicate bench_step bench_tp_step)
	FSDP_BUILD=$(BUILD)/gloo $(BUILD)/gloo/bench/bench_comm
	FSDP_BUILD=$(BUILD)/gloo FSDP_BACKEND=gloo $(BUILD)/gloo/bench/bench_step
	FSDP_BUILD=$(BUILD)/gloo FSDP_BACKEND=gloo $(BUILD)/gloo/bench/bench_replicate
	FSDP_BUILD=$(BUILD)/gloo FSDP_BACKEND=gloo $(BUILD)/gloo/bench/bench_plan --steps
	@$(PYTHON) -c 'import torch' 2>/dev/null || { echo "skipped: $(PYTHON) has no torch"; exit 0; }; \
	set -e; export FSDP_BUILD=$(BUILD)/gloo FSDP_BACKEND=gloo; \
	$(PYTHON) bench/compare_torch.py --bench $(BUILD)/gloo/bench/bench_comm; \
	$(PYTHON) bench/fsdp_step.py --bench $(BUILD)/gloo/bench/bench_step; \
	$(PYTHON) bench/compare_ddp.py --bench $(BUILD)/gloo/bench/bench_replicate; \
	$(PYTHON) bench/tp_step.py --bench $(BUILD)/gloo/bench/bench_tp_step

quiet-deps: | $(BUILD)
	@test $(DEPS) = no || test -e $(BUILD)/deps-tried || { : >$(BUILD)/deps-tried; tools/deps.sh; }
deps: ## install what tests and figures use (Debian, as root or by sudo)
	@tools/deps.sh

# In quotes, as a path may hold blanks: without them uninstall removes what stands behind one.
INTO := "$(DESTDIR)$(PREFIX)"
install: ## headers, tools and fsdp.pc below $DESTDIR$PREFIX
	mkdir -p $(foreach d,include/fsdp/core include/fsdp/plan include/fsdp/dtensor include/fsdp/checkpoint \
	    include/fsdp/safetensors \
	    include/fsdp/backends share/pkgconfig,$(INTO)/$d)
	install -m 644 $(HEADERS) $(INTO)/include/fsdp
	install -m 644 core/*.h $(INTO)/include/fsdp/core
	install -m 644 plan/*.h $(INTO)/include/fsdp/plan
	install -m 644 dtensor/*.h $(INTO)/include/fsdp/dtensor
	install -m 644 checkpoint/*.h $(INTO)/include/fsdp/checkpoint
	install -m 644 safetensors/*.h $(INTO)/include/fsdp/safetensors
	$(foreach b,$(wildcard backends/*.h backends/*.cc backends/*.cu),\
	    install -m 644 $b $(INTO)/include/fsdp/backends;)
	sed 's|@VERSION@|$(VERSION)|' fsdp.pc.in >$(INTO)/share/pkgconfig/fsdp.pc
	$(if $(TOOLS),$(MAKE) $(TOOLS) && install -d $(INTO)/bin && install -m 755 $(TOOLS) $(INTO)/bin)
uninstall:
	rm -rf $(INTO)/include/fsdp
	rm -f $(INTO)/share/pkgconfig/fsdp.pc $(foreach t,$(TOOLS:tools/%=%),$(INTO)/bin/$t)

format: ## clang-format over the sources
	clang-format -i $(HEADERS) $(PARTS) $(wildcard tests/*.[ch] examples/*.[ch] \
	    examples/gpt/*.[ch] bench/*.[ch] tools/*.c)
clean:
	rm -rf $(BUILD) $(TOOLS) examples/gpt/train_gpt
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile
