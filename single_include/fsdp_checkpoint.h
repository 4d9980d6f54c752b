// Written by tools/amalgamate.py from fsdp_checkpoint.h, /, checkpoint/: change those files.
/* fsdp_checkpoint.h - checkpoints of a model: safetensors files, old or new and never a mixture,
   that any number of ranks loads; an extension of fsdp.h

   Every rank writes its own rows into one file. A checkpoint of W ranks is loaded by any other
   number, on any mesh: each rank reads what it needs. Parameters and all that extensions keep
   (optimizers, scaler) are in it, and memory that you name.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_checkpoint.h"         // includes fsdp.h; link with -lm

       fsdp_checkpoint_blob blobs[1] = {{"loader", &loader, sizeof loader, 0, 0}};
       fsdp_checkpoint_desc desc = FSDP_ZERO;
       desc.blobs = blobs, desc.num_blobs = 1, desc.keep = 3;
       if (fsdp_checkpoint_create(model, &desc, &ck)) return 1;  // behind the optimizer
       if (fsdp_checkpoint_find(ck, "run", -1, path, sizeof path, &step)) return 1;
       if (step >= 0 && fsdp_checkpoint_load(ck, path, NULL)) return 1;
       for (step++; step < steps; step++) {
           ...                                     // forward, backward, optimizer, zero_grad
           if (step % 1000 == 0 && fsdp_checkpoint_save_async(ck, "run", step)) return 1;
           if (step % 10 == 0 && fsdp_checkpoint_poll(ck, NULL)) return 1;
       }
       if (fsdp_checkpoint_wait(ck)) return 1;

   SPDX-License-Identifier: MIT (full text in fsdp.h)

   WHAT IT PROMISES
     Old or new: whatever kills a job, and whenever, fsdp_checkpoint_find finds a complete
     checkpoint: this one or the one before. All files are on the disk before one rename gives the
     directory its name. With no_sync that holds for a killed job, but not for a power cut; load
     then notices by the checksums.
     A failure of a file on any rank fails the call on all ranks, with the rank, the file and the
     system's reason in the text. The world goes on, and so can training.
     No rank waits for another one's disk inside a collective: while files are written or read,
     ranks meet at least every 100 ms. So a checkpoint may take longer than the deadline.
     Bits: parameters, states and blobs come back exactly as they were. On CPU backends and on the
     same mesh a run that is resumed computes the same bits as one that was not interrupted.

   FILES
     DIR/step-NNNNNNNN/shard-RRRRR-model-00001-of-00001.safetensors   one for each rank that writes
     DIR/step-NNNNNNNN/manifest.json                                  sizes and checksums
     docs/checkpoints.md has them byte by byte. A data file is safetensors; PyTorch's
     HuggingFaceStorageReader reads such directories, and load reads those of its writer.

   NAMES
     A parameter is UNIT.PARAM; PARAM if its unit's name is "" or with param_names.
     Its states are optim.state.PARAMETER.STATE, for example optim.state.h.0.w.exp_avg.
     What an extension keeps besides is fsdp.EXTENSION.STATE; blobs are fsdp.blob.NAME. */
#include "fsdp.h"

/* ==== fsdp_safetensors.h ====================================================================
   the safetensors format: headers read and written, checksums, and what two
   boxes of a tensor share; an extension of fsdp.h

   A file of this format is a number of 8 bytes, a header of so many bytes (JSON), and the data. The
   header says which part of the data each tensor takes. One file may hold parts of tensors, boxes;
   then it has the sharding info that PyTorch's distributed checkpoint writes, too. This header has
   the functions for it that need no file, no memory and no other rank. It trusts no byte that it
   reads.

   #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_safetensors.h"        // includes fsdp.h; link with -lm
       #include <stdio.h>
       #include <stdlib.h>

   int main(void) {
           char header[256], why[200];
           fsdp_safetensors_entry w = FSDP_ZERO, *list; // a box: 2 of 3 rows
           fsdp_safetensors_info info;
           w.name = "h.0.w", w.dtype = FSDP_F32, w.ndim = 2;
           w.shape[0] = 2, w.shape[1] = 4, w.start[0] = 1, w.whole[0] = 3, w.whole[1] = 4;
           int64_t size = fsdp_safetensors_print(&w, 1, 1, NULL, NULL, 0, header, sizeof header);
           if (size < 0 || size > (int64_t)sizeof header) return 1;
           int64_t data = w.end; // bytes behind the header
           if (fsdp_safetensors_parse(header, size, data, NULL, NULL, &info, why, sizeof why)) {
               fprintf(stderr, "%s\n", why);
               return 1;
           }
           list = (fsdp_safetensors_entry *)malloc(sizeof *list * (size_t)info.num_entries);
           char *text = (char *)malloc((size_t)info.text_bytes);
           if (!list || !text) return 1;
           if (fsdp_safetensors_parse(header, size, data, list, text, &info, why, sizeof why)) {
               fprintf(stderr, "%s\n", why);
               return 1;
           }
           printf("%s: bytes %d to %d\n", list[0].name, (int)list[0].begin, (int)list[0].end);
           free(text);
           free(list);
           return 0;
       }

   WHAT IS THERE
     Headers: fsdp_safetensors_header_bytes, fsdp_safetensors_parse, fsdp_safetensors_print.
     Checksums: fsdp_crc32c. Boxes: fsdp_box_begin, fsdp_box_next.
     All of it compiles with FSDP_MATH_ONLY. No function calls anything but mem* and str*.
   WHICH FILES ARE TAKEN
     Those that safetensors 0.8 takes, with these exceptions: a name has 1 to 4,096 bytes, no NUL,
     and stands once; an entry is an object; a size is at most 2^62; DCP_SHARDING_INFO is checked; a
     number that means nothing may be too large for a double.
   TEXTS OF FAILURES
     They have no rank and no file: they are to stand behind the name of a file. Bytes "of the data"
     are counted from the end of the header, all other ones from the begin of the file. */

#ifndef FSDP_SAFETENSORS_H
#define FSDP_SAFETENSORS_H

#include "fsdp.h"

#ifdef __cplusplus
extern "C" {
#endif
// The columns of the declarations are set by hand.
// clang-format off

/* -------------------------------------------------------------------------------------------- */
/* Headers.                                                                                       */

enum { FSDP_SAFETENSORS_OTHER = 64 }; // a dtype that the format has and the library has not

// A tensor of a file, or a box of one.
typedef struct fsdp_safetensors_entry {
    const char *name;             // UTF-8, terminated; parse: in the caller's text room
    fsdp_dtype dtype;             // FSDP_F32, ..., or FSDP_SAFETENSORS_OTHER
    int32_t ndim;                 // of the file; shape, start, whole hold the first FSDP_MAX_DIMS
    int64_t shape[FSDP_MAX_DIMS]; // of the box
    int64_t start[FSDP_MAX_DIMS]; // where it begins in the whole tensor; 0 without sharding info
    int64_t whole[FSDP_MAX_DIMS]; // shape of the whole tensor; all 0: not told (files of PyTorch)
    int64_t begin, end;           // bytes of the data
    int32_t file_dtype, reserved; // the format's dtype, for fsdp_safetensors_dtype_name
} fsdp_safetensors_entry;

typedef struct fsdp_safetensors_info {
    int64_t num_entries, text_bytes; // room that entries and text need
    int32_t has_sharding, reserved;  // 1: there is DCP_SHARDING_INFO
    char writer[24];                 // "fsdp.writer" of the metadata: "3/8"; "": none, or longer
} fsdp_safetensors_info;

/* fsdp_safetensors_header_bytes - how many bytes the header of a file has
   first       the first 8 bytes of the file; not read if file_bytes is less
   header_bytes  out: so many bytes behind those 8 are the header; the data is what follows
   why         [why_cap] what is wrong, if the result is CORRUPT; else ""
   Result      FSDP_OK; CORRUPT (the file is shorter than 8 bytes, or than 8 and the header; more
               than 100,000,000 bytes); INVALID_ARG (NULL, a negative size)
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API fsdp_status fsdp_safetensors_header_bytes(const void *first, int64_t file_bytes,
                                                   int64_t *header_bytes, char *why,
                                                   size_t why_cap);

/* fsdp_safetensors_parse - check a header and list its tensors. Call it twice: to measure, and with
   room
   header      [header_bytes], from byte 8 of the file on
   data_bytes  of the file behind the header; tensors have to cover them, none twice
   entries, text   NULL: it checks what it can without memory, and measures. Else room as info told
               for the same header, and it checks everything. Entries come in the order of their
               bytes; text has to live as long as their names
   info        out; all 0 after a failure
   why         [why_cap] what is wrong and where, if the result is CORRUPT; else ""
   Result      FSDP_OK; CORRUPT; INVALID_ARG (NULL, a negative size); UNSUPPORTED (a big-endian
               host)
   Collective  no      Blocks no      Allocates no (stack: less than 2 KiB)      Thread any
   Source      safetensors: SafeTensors::read_metadata, Metadata::validate; torch:
               HuggingFaceStorageReader.read_metadata */
FSDP_API fsdp_status fsdp_safetensors_parse(const char *header, int64_t header_bytes,
                                            int64_t data_bytes, fsdp_safetensors_entry *entries,
                                            char *text, fsdp_safetensors_info *info, char *why,
                                            size_t why_cap);

/* fsdp_safetensors_print - write a header, with spaces up to a multiple of 8 bytes
   entries     [num] in: name, dtype, ndim, shape, and with sharded 1 start and whole (all 0 while a
               box begins or ends elsewhere: not told). Out: in the order of the file, I64 F64 F32
               I32 BF16 F16 I16 I8 U8, then names by bytes; begin, end and file_dtype are set
   sharded     1: with DCP_SHARDING_INFO
   keys, values  [num_pairs] of the metadata, keys in ascending order of bytes
   buf         [cap], or NULL to measure. If it is too small, its content is undefined
   Result      bytes of the header. -1: a name that is there twice, is "__metadata__", has no byte
               or more than 4,096; a text that is not UTF-8; a dtype that is not the library's;
               a shape, start or whole that is not possible; keys that do not ascend, or
               DCP_SHARDING_INFO among them; more than 100,000,000 bytes; NULL. Entries may have
               been moved then
   Collective  no      Blocks no      Allocates no      Thread any
   Source      safetensors: prepare; torch: HuggingFaceStorageWriter */
FSDP_API int64_t fsdp_safetensors_print(fsdp_safetensors_entry *entries, int64_t num, int sharded,
                                        const char *const *keys, const char *const *values,
                                        int num_pairs, char *buf, int64_t cap);

/* fsdp_safetensors_dtype_name - "F32", "F8_E4M3", ... of entry.file_dtype; "?" if it is none
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_safetensors_dtype_name(int32_t file_dtype);

/* -------------------------------------------------------------------------------------------- */
/* Checksums.                                                                                     */

/* fsdp_crc32c - the CRC-32C (Castagnoli) of more bytes. By an instruction where the processor has
   one, else by a table
   crc         0, or the CRC of the bytes before these
   nbytes      0 or less: none
   Result      that of "123456789" is 0xe3069283
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API uint32_t fsdp_crc32c(uint32_t crc, const void *data, int64_t nbytes);

/* -------------------------------------------------------------------------------------------- */
/* Boxes: an interval of each dim of a tensor.                                                    */

// What two boxes share: `rows` runs of `elements` that lie together in both.
typedef struct fsdp_box_overlap {
    int64_t rows, elements;                         // rows 0: nothing
    int64_t src, dst;                               // of this run: elements from a box's begin
    int32_t outer, reserved;                        // dims that are stepped through
    int64_t size[FSDP_MAX_DIMS], at[FSDP_MAX_DIMS]; // [outer] of what is shared; where this run is
    int64_t src_step[FSDP_MAX_DIMS], dst_step[FSDP_MAX_DIMS]; // [outer] elements
} fsdp_box_overlap;

/* fsdp_box_begin - what two boxes of one tensor share, at its first run
   fsdp_box_next  - the next run, in row-major order
   ndim        0 .. FSDP_MAX_DIMS; with 0 there is one element
   src_start, src_shape, dst_start, dst_shape  [ndim] in the whole tensor. A box with a negative
               number, one above 2^62, or more than 2^62 elements shares nothing; so does NULL
   Result      next: 1; 0: that was the last run, and the overlap is at its first one again
   Note        if (o.rows) do copy o.elements from src + o.src to dst + o.dst;
               while (fsdp_box_next(&o));
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _shards_get_overlap_region_wrt_saved_tensor */
FSDP_API void fsdp_box_begin(int ndim, const int64_t *src_start, const int64_t *src_shape,
                             const int64_t *dst_start, const int64_t *dst_shape,
                             fsdp_box_overlap *out);
FSDP_API int fsdp_box_next(fsdp_box_overlap *overlap);

// clang-format on
#ifdef __cplusplus
}
#endif
#endif // FSDP_SAFETENSORS_H

/* ============================================================================================ */
/* Implementation, leaves first. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_SAFETENSORS_IMPLEMENTED)
#define FSDP_SAFETENSORS_IMPLEMENTED

#include <string.h> // memcmp, memcpy, memset, strchr, strcmp, strlen
#if defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h> // __crc32cd, __crc32cb
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- */
// Owns: CRC-32C. Source: RFC 3720, appendix B.4; slicing by 8 as Intel's note of 2006 describes it.

// Entry i of a table is the sum of those of the bits of i: a table needs 8 numbers.
#define FSDPI_CRC_1(i, a, b, c, d, e, f, g, h)                                                     \
    ((i)&1 ? a : 0u) ^ ((i)&2 ? b : 0u) ^ ((i)&4 ? c : 0u) ^ ((i)&8 ? d : 0u) ^                    \
        ((i)&16 ? e : 0u) ^ ((i)&32 ? f : 0u) ^ ((i)&64 ? g : 0u) ^ ((i)&128 ? h : 0u)
#define FSDPI_CRC_4(i, ...)                                                                        \
    FSDPI_CRC_1(i, __VA_ARGS__), FSDPI_CRC_1((i) + 1, __VA_ARGS__),                                \
        FSDPI_CRC_1((i) + 2, __VA_ARGS__), FSDPI_CRC_1((i) + 3, __VA_ARGS__)
#define FSDPI_CRC_16(i, ...)                                                                       \
    FSDPI_CRC_4(i, __VA_ARGS__), FSDPI_CRC_4((i) + 4, __VA_ARGS__),                                \
        FSDPI_CRC_4((i) + 8, __VA_ARGS__), FSDPI_CRC_4((i) + 12, __VA_ARGS__)
#define FSDPI_CRC_64(i, ...)                                                                       \
    FSDPI_CRC_16(i, __VA_ARGS__), FSDPI_CRC_16((i) + 16, __VA_ARGS__),                             \
        FSDPI_CRC_16((i) + 32, __VA_ARGS__), FSDPI_CRC_16((i) + 48, __VA_ARGS__)
#define FSDPI_CRC_256(...)                                                                         \
    {                                                                                              \
        FSDPI_CRC_64(0, __VA_ARGS__), FSDPI_CRC_64(64, __VA_ARGS__),                               \
            FSDPI_CRC_64(128, __VA_ARGS__), FSDPI_CRC_64(192, __VA_ARGS__)                         \
    }

// [k][i]: the CRC, without its inversions, of byte i and k bytes of 0 behind it.
static const uint32_t fsdpi_crc_tables[8][256] = {
    FSDPI_CRC_256(0xF26B8303u, 0xE13B70F7u, 0xC79A971Fu, 0x8AD958CFu, 0x105EC76Fu, 0x20BD8EDEu,
                  0x417B1DBCu, 0x82F63B78u),
    FSDPI_CRC_256(0x13A29877u, 0x274530EEu, 0x4E8A61DCu, 0x9D14C3B8u, 0x3FC5F181u, 0x7F8BE302u,
                  0xFF17C604u, 0xFBC3FAF9u),
    FSDPI_CRC_256(0xA541927Eu, 0x4F6F520Du, 0x9EDEA41Au, 0x38513EC5u, 0x70A27D8Au, 0xE144FB14u,
                  0xC76580D9u, 0x8B277743u),
    FSDPI_CRC_256(0xDD45AAB8u, 0xBF672381u, 0x7B2231F3u, 0xF64463E6u, 0xE964B13Du, 0xD725148Bu,
                  0xABA65FE7u, 0x52A0C93Fu),
    FSDPI_CRC_256(0x38116FACu, 0x7022DF58u, 0xE045BEB0u, 0xC5670B91u, 0x8F2261D3u, 0x1BA8B557u,
                  0x37516AAEu, 0x6EA2D55Cu),
    FSDPI_CRC_256(0xEF306B19u, 0xDB8CA0C3u, 0xB2F53777u, 0x6006181Fu, 0xC00C303Eu, 0x85F4168Du,
                  0x0E045BEBu, 0x1C08B7D6u),
    FSDPI_CRC_256(0x68032CC8u, 0xD0065990u, 0xA5E0C5D1u, 0x4E2DFD53u, 0x9C5BFAA6u, 0x3D5B83BDu,
                  0x7AB7077Au, 0xF56E0EF4u),
    FSDPI_CRC_256(0x493C7D27u, 0x9278FA4Eu, 0x211D826Du, 0x423B04DAu, 0x847609B4u, 0x0D006599u,
                  0x1A00CB32u, 0x34019664u)};

static uint64_t fsdpi_st_little_endian(const unsigned char *p) {
    return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24 |
           (uint64_t)p[4] << 32 | (uint64_t)p[5] << 40 | (uint64_t)p[6] << 48 |
           (uint64_t)p[7] << 56;
}

static uint32_t fsdpi_crc_by_table(uint32_t crc, const unsigned char *p, int64_t n) {
    const uint32_t(*t)[256] = fsdpi_crc_tables;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t x = fsdpi_st_little_endian(p) ^ crc;
        crc = t[7][x & 255] ^ t[6][x >> 8 & 255] ^ t[5][x >> 16 & 255] ^ t[4][x >> 24 & 255] ^
              t[3][x >> 32 & 255] ^ t[2][x >> 40 & 255] ^ t[1][x >> 48 & 255] ^ t[0][x >> 56];
    }
    for (; n > 0; n--) crc = crc >> 8 ^ t[0][(crc ^ *p++) & 255];
    return crc;
}

// nvcc does not know how gcc names instructions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
#define FSDPI_CRC_TARGET __attribute__((target("sse4.2")))
FSDPI_CRC_TARGET static inline uint32_t fsdpi_crc_8(uint32_t crc, const unsigned char *p) {
    unsigned long long x;
    memcpy(&x, p, 8);
    return (uint32_t)__builtin_ia32_crc32di(crc, x);
}
FSDPI_CRC_TARGET static inline uint32_t fsdpi_crc_1(uint32_t crc, const unsigned char *p) {
    return __builtin_ia32_crc32qi(crc, *p);
}
static int fsdpi_crc_has_instruction(void) { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#define FSDPI_CRC_TARGET
static inline uint32_t fsdpi_crc_8(uint32_t crc, const unsigned char *p) {
    return __crc32cd(crc, fsdpi_st_little_endian(p));
}
static inline uint32_t fsdpi_crc_1(uint32_t crc, const unsigned char *p) {
    return __crc32cb(crc, *p);
}
static int fsdpi_crc_has_instruction(void) { return 1; }
#else
#define fsdpi_crc_by_instruction fsdpi_crc_by_table
static int fsdpi_crc_has_instruction(void) { return 0; }
#endif

#ifdef FSDPI_CRC_TARGET
enum { FSDPI_CRC_LANE = 4096 };
// Entry i: the CRC, without its inversions, of bit i and FSDPI_CRC_LANE bytes of 0 behind it.
static const uint32_t fsdpi_crc_lane[32] = {
    0xC2A5B65Eu, 0x80A71A4Du, 0x04A2426Bu, 0x094484D6u, 0x128909ACu, 0x25121358u, 0x4A2426B0u,
    0x94484D60u, 0x2D7CEC31u, 0x5AF9D862u, 0xB5F3B0C4u, 0x6E0B1779u, 0xDC162EF2u, 0xBDC02B15u,
    0x7E6C20DBu, 0xFCD841B6u, 0xFC5CF59Du, 0xFD559DCBu, 0xFF474D67u, 0xFB62EC3Fu, 0xF329AE8Fu,
    0xE3BF2BEFu, 0xC292212Fu, 0x80C834AFu, 0x047C1FAFu, 0x08F83F5Eu, 0x11F07EBCu, 0x23E0FD78u,
    0x47C1FAF0u, 0x8F83F5E0u, 0x1AEB9D31u, 0x35D73A62u};

static uint32_t fsdpi_crc_behind_lane(uint32_t crc) {
    uint32_t moved = 0;
    for (int i = 0; i < 32; i++) moved ^= fsdpi_crc_lane[i] & (0u - (crc >> i & 1));
    return moved;
}
// An instruction waits for the one before it, and three can be under way: three lanes of bytes, one
// behind another in memory, are read side by side.
FSDPI_CRC_TARGET static uint32_t fsdpi_crc_by_instruction(uint32_t crc, const unsigned char *p,
                                                          int64_t n) {
    for (; n >= 3 * FSDPI_CRC_LANE; n -= 3 * FSDPI_CRC_LANE, p += 3 * FSDPI_CRC_LANE) {
        uint32_t second = 0, third = 0;
        for (int i = 0; i < FSDPI_CRC_LANE; i += 8) {
            crc = fsdpi_crc_8(crc, p + i);
            second = fsdpi_crc_8(second, p + FSDPI_CRC_LANE + i);
            third = fsdpi_crc_8(third, p + 2 * FSDPI_CRC_LANE + i);
        }
        crc = fsdpi_crc_behind_lane(fsdpi_crc_behind_lane(crc) ^ second) ^ third;
    }
    for (; n >= 8; n -= 8, p += 8) crc = fsdpi_crc_8(crc, p);
    for (; n > 0; n--) crc = fsdpi_crc_1(crc, p++);
    return crc;
}
#endif

FSDP_API uint32_t fsdp_crc32c(uint32_t crc, const void *data, int64_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    return ~(fsdpi_crc_has_instruction() ? fsdpi_crc_by_instruction(~crc, p, nbytes)
                                         : fsdpi_crc_by_table(~crc, p, nbytes));
}

/* -------------------------------------------------------------------------------------------- */
// Owns: boxes. Source: torch/distributed/checkpoint/resharding.py.

#define FSDPI_ST_MOST ((int64_t)1 << 62) // sizes, places, elements

static int fsdpi_box_possible(int ndim, const int64_t *start, const int64_t *shape) {
    int64_t numel = 1;
    for (int d = 0; d < ndim; d++)
        if (start[d] < 0 || shape[d] < 0 || start[d] > FSDPI_ST_MOST ||
            shape[d] > FSDPI_ST_MOST - start[d])
            return 0;
    for (int d = 0; d < ndim; d++)
        if (!shape[d]) return 1; // no element, however long other dims are
    for (int d = 0; d < ndim; d++) {
        if (numel > FSDPI_ST_MOST / shape[d]) return 0;
        numel *= shape[d];
    }
    return 1;
}

FSDP_API void fsdp_box_begin(int ndim, const int64_t *src_start, const int64_t *src_shape,
                             const int64_t *dst_start, const int64_t *dst_shape,
                             fsdp_box_overlap *out) {
    int64_t size[FSDP_MAX_DIMS], src[FSDP_MAX_DIMS], dst[FSDP_MAX_DIMS], src_step = 1, dst_step = 1;
    if (!out) return;
    memset(out, 0, sizeof *out);
    if (ndim > 0 && (!src_start || !src_shape || !dst_start || !dst_shape)) return;
    if (ndim < 0 || ndim > FSDP_MAX_DIMS || !fsdpi_box_possible(ndim, src_start, src_shape) ||
        !fsdpi_box_possible(ndim, dst_start, dst_shape))
        return;
    for (int d = 0; d < ndim; d++) {
        int64_t from = src_start[d] > dst_start[d] ? src_start[d] : dst_start[d];
        int64_t src_end = src_start[d] + src_shape[d], dst_end = dst_start[d] + dst_shape[d];
        size[d] = (src_end < dst_end ? src_end : dst_end) - from;
        src[d] = from - src_start[d];
        dst[d] = from - dst_start[d];
        if (size[d] <= 0) return;
    }
    out->rows = out->elements = 1;
    for (int d = ndim - 1, together = 1; d >= 0; d--) {
        if (together) {
            out->elements *= size[d];
        } else {
            out->rows *= size[d];
            out->size[d] = size[d], out->src_step[d] = src_step, out->dst_step[d] = dst_step;
            if (d + 1 > out->outer) out->outer = d + 1;
        }
        // Runs of this dim touch each other if both boxes have no more than what they share.
        together &= size[d] == src_shape[d] && size[d] == dst_shape[d];
        out->src += src[d] * src_step;
        out->dst += dst[d] * dst_step;
        src_step *= src_shape[d];
        dst_step *= dst_shape[d];
    }
}

FSDP_API int fsdp_box_next(fsdp_box_overlap *o) {
    for (int d = o ? o->outer - 1 : -1; d >= 0; d--) {
        o->src += o->src_step[d];
        o->dst += o->dst_step[d];
        if (++o->at[d] < o->size[d]) return 1;
        o->src -= o->size[d] * o->src_step[d];
        o->dst -= o->size[d] * o->dst_step[d];
        o->at[d] = 0;
    }
    return 0;
}

/* -------------------------------------------------------------------------------------------- */
// Owns: what the format is made of: dtypes, sizes, UTF-8, and texts that are put together.

enum { FSDPI_ST_HEADER = 100000000, FSDPI_ST_NAME = 4096, FSDPI_ST_DEPTH = 127 };
#define FSDPI_ST_SHARDING "DCP_SHARDING_INFO"

// The format's dtypes with their bits, in its order. A file has the last ones first, so that each
// tensor is aligned.
#define FSDPI_ST_DTYPE_LIST(X)                                                                     \
    X(BOOL, 8, SAFETENSORS_OTHER)                                                                  \
    X(F4, 4, SAFETENSORS_OTHER)                                                                    \
    X(F6_E2M3, 6, SAFETENSORS_OTHER)                                                               \
    X(F6_E3M2, 6, SAFETENSORS_OTHER)                                                               \
    X(U8, 8, U8)                                                                                   \
    X(I8, 8, I8)                                                                                   \
    X(F8_E5M2, 8, SAFETENSORS_OTHER)                                                               \
    X(F8_E4M3, 8, SAFETENSORS_OTHER)                                                               \
    X(F8_E8M0, 8, SAFETENSORS_OTHER)                                                               \
    X(F8_E4M3FNUZ, 8, SAFETENSORS_OTHER)                                                           \
    X(F8_E5M2FNUZ, 8, SAFETENSORS_OTHER)                                                           \
    X(I16, 16, I16)                                                                                \
    X(U16, 16, SAFETENSORS_OTHER)                                                                  \
    X(F16, 16, F16)                                                                                \
    X(BF16, 16, BF16)                                                                              \
    X(I32, 32, I32)                                                                                \
    X(U32, 32, SAFETENSORS_OTHER)                                                                  \
    X(F32, 32, F32)                                                                                \
    X(C64, 64, SAFETENSORS_OTHER)                                                                  \
    X(F64, 64, F64)                                                                                \
    X(I64, 64, I64)                                                                                \
    X(U64, 64, SAFETENSORS_OTHER)

static const struct {
    char name[14];
    uint8_t bits, dtype;
} fsdpi_st_dtypes[] = {
#define FSDP_X(name, bits, dtype) {#name, bits, FSDP_##dtype},
    FSDPI_ST_DTYPE_LIST(FSDP_X)
#undef FSDP_X
};
enum { FSDPI_ST_DTYPES = sizeof fsdpi_st_dtypes / sizeof *fsdpi_st_dtypes };

FSDP_API const char *fsdp_safetensors_dtype_name(int32_t file_dtype) {
    return file_dtype >= 0 && file_dtype < FSDPI_ST_DTYPES ? fsdpi_st_dtypes[file_dtype].name : "?";
}

// Elements of a shape, counted as the reference counts them: from left to right, so that a product
// that is too large stays so if a 0 follows. 0: it is more than 64 bits hold.
static int fsdpi_st_numel(uint64_t *numel, uint64_t size) {
    if (size && *numel > UINT64_MAX / size) return 0;
    *numel *= size;
    return 1;
}

// Bytes of the UTF-8 character at s, of n > 0 that are there; 0: it is none.
static int fsdpi_st_character(const unsigned char *s, int64_t n) {
    int size = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xC2 || s[0] > 0xF4 || size > n) return 0;
    for (int i = 1; i < size; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    if (s[0] == 0xE0 && s[1] < 0xA0) return 0;  // has a shorter form
    if (s[0] == 0xED && s[1] >= 0xA0) return 0; // a surrogate
    if (s[0] == 0xF0 && s[1] < 0x90) return 0;  // has a shorter form
    if (s[0] == 0xF4 && s[1] >= 0x90) return 0; // above U+10FFFF
    return size;
}

// How many bytes are UTF-8; n: all.
static int64_t fsdpi_st_utf8(const unsigned char *s, int64_t n) {
    int64_t at = 0;
    for (int size = 1; at < n && size > 0; at += size) size = fsdpi_st_character(s + at, n - at);
    return at;
}

static int fsdpi_st_encode(uint32_t c, char *out) {
    int size = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (int i = size - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
    out[0] = (char)(lead[size] | c);
    return size;
}

// A text that is written as far as there is room, and measured.
typedef struct fsdpi_st_out {
    char *to;
    int64_t cap, used;
} fsdpi_st_out;

static void fsdpi_st_put(fsdpi_st_out *o, const char *from, int64_t n) {
    int64_t room = o->cap - o->used;
    if (n < room) room = n;
    if (room > 0) memcpy(o->to + o->used, from, (size_t)room);
    o->used += n;
}

static void fsdpi_st_puts(fsdpi_st_out *o, const char *text) {
    fsdpi_st_put(o, text, (int64_t)strlen(text));
}

static void fsdpi_st_put_number(fsdpi_st_out *o, uint64_t x) {
    char digits[20];
    int at = 20;
    do digits[--at] = (char)('0' + x % 10);
    while (x /= 10);
    fsdpi_st_put(o, digits + at, 20 - at);
}

static void fsdpi_st_put_list(fsdpi_st_out *o, int ndim, const int64_t *list, const char *comma) {
    fsdpi_st_puts(o, "[");
    for (int d = 0; d < ndim && d < FSDP_MAX_DIMS; d++) {
        if (d) fsdpi_st_puts(o, comma);
        fsdpi_st_put_number(o, (uint64_t)list[d]);
    }
    fsdpi_st_puts(o, ndim > FSDP_MAX_DIMS ? ", ...]" : "]");
}

// A text of a file, in an error's: its begin, without what could end a line or steer a terminal.
static void fsdpi_st_put_shown(fsdpi_st_out *o, const char *s) {
    int n = 0;
    while (n < 64 && s[n]) n++;
    if (s[n])
        while (n > 0 && ((unsigned char)s[n] & 0xC0) == 0x80) n--; // whole characters
    for (int i = 0; i < n; i++)
        fsdpi_st_put(o, (unsigned char)s[i] < 0x20 || s[i] == 0x7F ? "?" : s + i, 1);
    if (s[n]) fsdpi_st_puts(o, "...");
}

// Ends a text in its room of cap + 1 bytes; no character is cut.
static void fsdpi_st_end(fsdpi_st_out *o) {
    int64_t n = o->used < o->cap ? o->used : o->cap, last = n;
    if (!o->to) return;
    while (last > 0 && ((unsigned char)o->to[last - 1] & 0xC0) == 0x80) last--;
    if (last > 0 && !fsdpi_st_character((unsigned char *)o->to + last - 1, n - last + 1))
        n = last - 1;
    o->to[n] = 0;
}

static fsdpi_st_out fsdpi_st_why(char *why, size_t cap) {
    fsdpi_st_out o = {why && cap ? why : NULL, why && cap ? (int64_t)cap - 1 : 0, 0};
    return o;
}

/* -------------------------------------------------------------------------------------------- */
// Owns: the heap sort, of entries or of their indices.

typedef int (*fsdpi_st_order)(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b);

typedef struct fsdpi_st_sorted {
    fsdp_safetensors_entry *entries;
    char *index; // NULL, or uint32_t[n] at any address: these are sorted, and entries stay
    int64_t n;
    fsdpi_st_order before;
} fsdpi_st_sorted;

static uint32_t fsdpi_st_index(const fsdpi_st_sorted *s, int64_t i) {
    uint32_t at;
    memcpy(&at, s->index + 4 * i, 4);
    return at;
}

static fsdp_safetensors_entry *fsdpi_st_entry_at(const fsdpi_st_sorted *s, int64_t i) {
    return &s->entries[s->index ? (int64_t)fsdpi_st_index(s, i) : i];
}

static int fsdpi_st_before(const fsdpi_st_sorted *s, int64_t i, int64_t j) {
    return s->before(fsdpi_st_entry_at(s, i), fsdpi_st_entry_at(s, j));
}

static void fsdpi_st_swap(const fsdpi_st_sorted *s, int64_t i, int64_t j) {
    if (s->index) {
        uint32_t a = fsdpi_st_index(s, i), b = fsdpi_st_index(s, j);
        memcpy(s->index + 4 * i, &b, 4);
        memcpy(s->index + 4 * j, &a, 4);
    } else {
        fsdp_safetensors_entry e = s->entries[i];
        s->entries[i] = s->entries[j];
        s->entries[j] = e;
    }
}

static void fsdpi_st_sift(const fsdpi_st_sorted *s, int64_t at, int64_t n) {
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && fsdpi_st_before(s, child, child + 1)) child++;
        if (!fsdpi_st_before(s, at, child)) return;
        fsdpi_st_swap(s, at, child);
    }
}

static void fsdpi_st_sort(const fsdpi_st_sorted *s) {
    int64_t i = 1;
    while (i < s->n && !fsdpi_st_before(s, i, i - 1)) i++;
    if (i >= s->n) return; // as most files are
    for (i = s->n / 2; i > 0; i--) fsdpi_st_sift(s, i - 1, s->n);
    for (i = s->n - 1; i > 0; i--) {
        fsdpi_st_swap(s, 0, i);
        fsdpi_st_sift(s, 0, i);
    }
}

static int fsdpi_st_by_name(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b) {
    return strcmp(a->name, b->name) < 0;
}

// One without bytes comes before the one that begins there; equal ones as they stand in the header.
static int fsdpi_st_by_place(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b) {
    if (a->begin != b->begin) return a->begin < b->begin;
    return a->end != b->end ? a->end < b->end : a->name < b->name;
}

static int fsdpi_st_by_file(const fsdp_safetensors_entry *a, const fsdp_safetensors_entry *b) {
    if (a->file_dtype != b->file_dtype) return a->file_dtype > b->file_dtype;
    return fsdpi_st_by_name(a, b);
}

/* -------------------------------------------------------------------------------------------- */
// Owns: reading JSON: spaces, strings, integers, members, and values that are skipped. A function
// returns 1, or 0 behind a failure, whose text is written. Nothing recurses.

typedef struct fsdpi_st_string { // in the text, between its quotes
    int64_t begin, end, bytes;   // bytes: without escapes
} fsdpi_st_string;

typedef struct fsdpi_st_reader {
    const unsigned char *text; // UTF-8
    int64_t size, at;
    int64_t origin;       // of positions that are told
    const char *inside;   // what texts of failures begin with
    fsdpi_st_string name; // of the tensor that is read
    fsdpi_st_out *why;
} fsdpi_st_reader;

// What a failure's text names: %a, %b texts of the file; %0 .. %3 numbers; %e dtype and shape.
typedef struct fsdpi_st_facts {
    const char *a, *b;
    int64_t n[4];
    const fsdp_safetensors_entry *e;
} fsdpi_st_facts;

static fsdpi_st_facts fsdpi_st_numbers(const char *a, int64_t n0, int64_t n1, int64_t n2) {
    fsdpi_st_facts f = {a, NULL, {n0, n1, n2, 0}, NULL};
    return f;
}

static int fsdpi_st_hex(const unsigned char *s, int64_t n) {
    int x = 0;
    if (n < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = s[i] >= 'A' ? s[i] | 0x20 : s[i]; // a letter as a small one
        if ((c < '0' || c > '9') && (c < 'a' || c > 'f')) return -1;
        x = x * 16 + (c <= '9' ? c - '0' : c - 'a' + 10);
    }
    return x;
}

// The byte or escape at s, of n > 0 bytes, becomes bytes of out[4]. Returns how many; 0: an escape
// that JSON has not. taken: of s.
static int fsdpi_st_decode(const unsigned char *s, int64_t n, char *out, int *taken) {
    static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    *taken = s[0] == '\\' ? 2 : 1;
    out[0] = (char)s[0];
    if (s[0] != '\\') return 1;
    if (n < 2 || !s[1]) return 0;
    const char *letter = strchr(letters, s[1]);
    if (letter) {
        out[0] = meant[letter - letters];
        return 1;
    }
    int high = s[1] == 'u' ? fsdpi_st_hex(s + 2, n - 2) : -1;
    *taken = 6;
    if (high < 0 || (high & 0xFC00) == 0xDC00) return 0;
    if ((high & 0xFC00) != 0xD800) return fsdpi_st_encode((uint32_t)high, out);
    int low = n >= 12 && s[6] == '\\' && s[7] == 'u' ? fsdpi_st_hex(s + 8, n - 8) : -1;
    *taken = 12;
    if (low < 0 || (low & 0xFC00) != 0xDC00) return 0; // half a pair
    return fsdpi_st_encode(0x10000u + ((uint32_t)(high & 0x3FF) << 10) + (uint32_t)(low & 0x3FF),
                           out);
}

// The string without its escapes, at most `room` bytes of it, and a NUL. `to` may be its own place.
static void fsdpi_st_copy(const fsdpi_st_reader *r, const fsdpi_st_string *s, char *to,
                          int64_t room) {
    int64_t n = 0;
    for (int64_t at = s->begin; at < s->end;) {
        char unit[4];
        int taken, size = fsdpi_st_decode(r->text + at, s->end - at, unit, &taken);
        if (n + size > room) break;
        memcpy(to + n, unit, (size_t)size);
        n += size;
        at += taken;
    }
    to[n] = 0;
}

static int fsdpi_st_is(const fsdpi_st_reader *r, const fsdpi_st_string *s, const char *word) {
    char copy[24];
    int64_t n = (int64_t)strlen(word);
    if (s->bytes != n) return 0;
    fsdpi_st_copy(r, s, copy, (int64_t)sizeof copy - 1);
    return memcmp(copy, word, (size_t)n) == 0;
}

static void fsdpi_st_put_got(const fsdpi_st_reader *r, fsdpi_st_out *o) {
    static const char hex[] = "0123456789abcdef";
    int c = r->at < r->size ? r->text[r->at] : -1;
    char shown[] = "'c'", byte[] = "byte 0x00";
    shown[1] = (char)c;
    if (c >= 0) byte[7] = hex[c >> 4], byte[8] = hex[c & 15];
    fsdpi_st_puts(o, c < 0 ? "the end" : c > 0x20 && c < 0x7F ? shown : byte);
}

// Writes a failure's text. %p is the position, %g what stands there, %t the tensor that is read.
static int fsdpi_st_fail(const fsdpi_st_reader *r, const char *form, fsdpi_st_facts f) {
    fsdpi_st_out *o = r->why;
    char name[72];
    o->used = 0;
    fsdpi_st_puts(o, r->inside);
    for (; *form; form++) {
        if (*form != '%') fsdpi_st_put(o, form, 1);
        else switch (*++form) {
            case 'a': fsdpi_st_put_shown(o, f.a); break;
            case 'b': fsdpi_st_put_shown(o, f.b); break;
            case 'e':
                fsdpi_st_puts(o, f.e->dtype == FSDP_SAFETENSORS_OTHER
                                     ? fsdp_safetensors_dtype_name(f.e->file_dtype)
                                     : fsdp_dtype_name(f.e->dtype));
                fsdpi_st_puts(o, " ");
                fsdpi_st_put_list(o, f.e->ndim, f.e->shape, ", ");
                break;
            case 'g': fsdpi_st_put_got(r, o); break;
            case 'p': fsdpi_st_put_number(o, (uint64_t)(r->origin + r->at)); break;
            case 't':
                fsdpi_st_copy(r, &r->name, name, 70);
                fsdpi_st_put_shown(o, name);
                break;
            default: fsdpi_st_put_number(o, (uint64_t)f.n[*form - '0']);
            }
    }
    return 0;
}

static int fsdpi_st_wrong(const fsdpi_st_reader *r, const char *form) {
    return fsdpi_st_fail(r, form, fsdpi_st_numbers(NULL, 0, 0, 0));
}
static int fsdpi_st_expected(const fsdpi_st_reader *r, const char *what) {
    return fsdpi_st_fail(r, "at byte %p: expected %a, got %g", fsdpi_st_numbers(what, 0, 0, 0));
}

// What stands behind spaces; -1: the end.
static int fsdpi_st_peek(fsdpi_st_reader *r) {
    for (; r->at < r->size; r->at++) {
        int c = r->text[r->at];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return c;
    }
    return -1;
}

static int fsdpi_st_took(fsdpi_st_reader *r, char c) {
    if (fsdpi_st_peek(r) != c) return 0;
    r->at++;
    return 1;
}

static int fsdpi_st_read_string(fsdpi_st_reader *r, fsdpi_st_string *out) {
    if (fsdpi_st_peek(r) != '"') return fsdpi_st_expected(r, "a string");
    out->begin = ++r->at;
    out->bytes = 0;
    for (; r->at < r->size && r->text[r->at] != '"';) {
        char unit[4];
        int taken = 1, size = 1;
        if (r->text[r->at] < 0x20)
            return fsdpi_st_wrong(r, "at byte %p: a string has %g, which it may have as an escape");
        if (r->text[r->at] == '\\')
            size = fsdpi_st_decode(r->text + r->at, r->size - r->at, unit, &taken);
        if (!size) return fsdpi_st_wrong(r, "at byte %p: an escape that JSON does not have");
        out->bytes += size;
        r->at += taken;
    }
    if (r->at >= r->size) return fsdpi_st_expected(r, "the end of a string");
    out->end = r->at++;
    return 1;
}

static int fsdpi_st_is_digit(const fsdpi_st_reader *r) {
    return r->at < r->size && r->text[r->at] >= '0' && r->text[r->at] <= '9';
}

static int fsdpi_st_read_integer(fsdpi_st_reader *r, int64_t *out) {
    uint64_t x = 0, most = (uint64_t)FSDPI_ST_MOST;
    int c = fsdpi_st_peek(r), large = 0;
    int64_t begin = r->at;
    if (!fsdpi_st_is_digit(r)) return fsdpi_st_expected(r, "an integer");
    for (; fsdpi_st_is_digit(r); r->at++) {
        uint64_t digit = (uint64_t)(r->text[r->at] - '0');
        large |= x > (most - digit) / 10;
        x = large ? 0 : x * 10 + digit;
    }
    if (c == '0' && r->at - begin > 1) {
        r->at = begin;
        return fsdpi_st_wrong(r, "at byte %p: an integer begins with 0");
    }
    c = r->at < r->size ? r->text[r->at] : -1;
    if (c == '.' || c == 'e' || c == 'E') return fsdpi_st_expected(r, "the end of an integer");
    if (large) {
        r->at = begin;
        return fsdpi_st_wrong(r, "at byte %p: an integer above 2^62");
    }
    *out = (int64_t)x;
    return 1;
}

// A list of integers, of which the first ones are kept.
typedef struct fsdpi_st_list {
    int64_t count, v[FSDP_MAX_DIMS];
    uint64_t numel; // their product
    int overflow;
} fsdpi_st_list;

static int fsdpi_st_read_list(fsdpi_st_reader *r, fsdpi_st_list *out) {
    int64_t x = 0;
    memset(out, 0, sizeof *out);
    out->numel = 1;
    if (!fsdpi_st_took(r, '[')) return fsdpi_st_expected(r, "'['");
    if (fsdpi_st_took(r, ']')) return 1;
    do {
        if (!fsdpi_st_read_integer(r, &x)) return 0;
        if (out->count < FSDP_MAX_DIMS) out->v[out->count] = x;
        out->count++;
        out->overflow |= !fsdpi_st_numel(&out->numel, (uint64_t)x);
    } while (fsdpi_st_took(r, ','));
    return fsdpi_st_took(r, ']') || fsdpi_st_expected(r, "',' or ']'");
}

static int fsdpi_st_read_key(fsdpi_st_reader *r, fsdpi_st_string *key) {
    if (!fsdpi_st_read_string(r, key)) return 0;
    return fsdpi_st_took(r, ':') || fsdpi_st_expected(r, "':'");
}

// The next member of an object, `*count` behind its '{'. Returns 1, 0 at its end, -1 for a failure.
static int fsdpi_st_read_member(fsdpi_st_reader *r, int64_t *count, fsdpi_st_string *key) {
    if (fsdpi_st_took(r, '}')) return 0;
    if ((*count)++ && !fsdpi_st_took(r, ',')) {
        fsdpi_st_expected(r, "',' or '}'");
        return -1;
    }
    return fsdpi_st_read_key(r, key) ? 1 : -1;
}

static int fsdpi_st_skip_digits(fsdpi_st_reader *r) {
    if (!fsdpi_st_is_digit(r)) return fsdpi_st_expected(r, "a digit");
    while (fsdpi_st_is_digit(r)) r->at++;
    return 1;
}

static int fsdpi_st_skip_number(fsdpi_st_reader *r) {
    if (r->text[r->at] == '-') r->at++;
    if (r->at < r->size && r->text[r->at] == '0') r->at++; // nothing but 0 begins with 0
    else if (!fsdpi_st_skip_digits(r)) return 0;
    if (r->at < r->size && r->text[r->at] == '.') {
        r->at++;
        if (!fsdpi_st_skip_digits(r)) return 0;
    }
    if (r->at >= r->size || (r->text[r->at] | 0x20) != 'e') return 1;
    r->at++;
    if (r->at < r->size && (r->text[r->at] == '+' || r->text[r->at] == '-')) r->at++;
    return fsdpi_st_skip_digits(r);
}

static int fsdpi_st_read_word(fsdpi_st_reader *r, const char *word) {
    int64_t n = (int64_t)strlen(word);
    if (r->size - r->at < n || memcmp(r->text + r->at, word, (size_t)n) != 0)
        return fsdpi_st_expected(r, "a value");
    r->at += n;
    return 1;
}

static int fsdpi_st_skip_scalar(fsdpi_st_reader *r) {
    fsdpi_st_string s;
    int c = fsdpi_st_peek(r);
    if (c == '"') return fsdpi_st_read_string(r, &s);
    if (c == '-' || (c >= '0' && c <= '9')) return fsdpi_st_skip_number(r);
    return fsdpi_st_read_word(r, c == 't' ? "true" : c == 'f' ? "false" : "null");
}

// Any value, inside of `level` objects.
static int fsdpi_st_skip(fsdpi_st_reader *r, int level) {
    char ends[FSDPI_ST_DEPTH]; // of what is open
    int depth = 0;
    fsdpi_st_string key;
    for (;;) {
        int c = fsdpi_st_peek(r);
        if (c == '{' || c == '[') {
            if (level + depth == FSDPI_ST_DEPTH)
                return fsdpi_st_fail(r, "at byte %p: more than %0 levels",
                                     fsdpi_st_numbers(NULL, FSDPI_ST_DEPTH, 0, 0));
            ends[depth++] = c == '{' ? '}' : ']';
            r->at++;
            if (fsdpi_st_peek(r) != ends[depth - 1]) {
                if (c == '{' && !fsdpi_st_read_key(r, &key)) return 0;
                continue;
            }
        } else if (!fsdpi_st_skip_scalar(r)) {
            return 0;
        }
        while (depth && fsdpi_st_took(r, ends[depth - 1])) depth--;
        if (!depth) return 1;
        if (!fsdpi_st_took(r, ','))
            return fsdpi_st_expected(r, ends[depth - 1] == '}' ? "',' or '}'" : "',' or ']'");
        if (ends[depth - 1] == '}' && !fsdpi_st_read_key(r, &key)) return 0;
    }
}

/* -------------------------------------------------------------------------------------------- */
// Owns: reading headers. Invariant: the call that measures and the one with room go the same way.

typedef struct fsdpi_st_parser {
    fsdpi_st_reader r;
    fsdp_safetensors_entry *entries;
    char *text; // NULL: measure
    int64_t data_bytes;
    int64_t num, names;       // entries, and bytes of their names
    int metadata;             // times that it was there
    int no_room;              // 1: there are entries, and text without room for them
    fsdpi_st_string sharding; // begin 0: none
    fsdp_safetensors_info *info;
} fsdpi_st_parser;

static int fsdpi_st_check_entry(const fsdpi_st_reader *r, fsdp_safetensors_entry *e,
                                const fsdpi_st_list *shape, const fsdpi_st_list *offsets) {
    uint64_t bits = fsdpi_st_dtypes[e->file_dtype].bits, numel = shape->numel;
    fsdpi_st_facts f = {NULL, NULL, {offsets->v[0], offsets->v[1], 0, 0}, e};
    e->ndim = (int32_t)shape->count;
    memcpy(e->shape, shape->v, sizeof e->shape);
    e->begin = offsets->v[0];
    e->end = offsets->v[1];
    if (offsets->count != 2)
        return fsdpi_st_fail(r, "tensor '%t': data_offsets has %0 numbers, expected 2",
                             fsdpi_st_numbers(NULL, offsets->count, 0, 0));
    if (shape->overflow || !fsdpi_st_numel(&numel, bits))
        return fsdpi_st_fail(r, "tensor '%t': %e has more than 2^64 bits", f);
    if (numel % 8) return fsdpi_st_fail(r, "tensor '%t': %e does not end at a whole byte", f);
    f.n[2] = (int64_t)(numel / 8);
    if (e->end < e->begin || e->end - e->begin != f.n[2])
        return fsdpi_st_fail(r, "tensor '%t': bytes %0..%1 for %e, expected %2", f);
    return 1;
}

static int fsdpi_st_read_dtype(fsdpi_st_reader *r, fsdp_safetensors_entry *e) {
    fsdpi_st_string s;
    char name[72];
    if (!fsdpi_st_read_string(r, &s)) return 0;
    for (int i = 0; i < FSDPI_ST_DTYPES; i++) {
        if (!fsdpi_st_is(r, &s, fsdpi_st_dtypes[i].name)) continue;
        e->dtype = fsdpi_st_dtypes[i].dtype;
        e->file_dtype = i;
        return 1;
    }
    fsdpi_st_copy(r, &s, name, 70);
    return fsdpi_st_fail(r, "tensor '%t': '%a' is no dtype of the format",
                         fsdpi_st_numbers(name, 0, 0, 0));
}

static int fsdpi_st_read_entry(fsdpi_st_reader *r, fsdp_safetensors_entry *e) {
    static const char *const words[] = {"dtype", "shape", "data_offsets"};
    fsdpi_st_list lists[2];
    fsdpi_st_string key;
    int64_t count = 0;
    int seen = 0, more, what;
    memset(e, 0, sizeof *e);
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &count, &key)) > 0) {
        for (what = 0; what < 3 && !fsdpi_st_is(r, &key, words[what]);) what++;
        if (seen & 1 << what & 7)
            return fsdpi_st_fail(r, "at byte %p: tensor '%t' has '%a' twice",
                                 fsdpi_st_numbers(words[what], 0, 0, 0));
        seen |= 1 << what;
        if (!(what == 0  ? fsdpi_st_read_dtype(r, e)
              : what < 3 ? fsdpi_st_read_list(r, &lists[what - 1])
                         : fsdpi_st_skip(r, 2)))
            return 0;
    }
    if (more < 0) return 0;
    for (what = 0; what < 3; what++)
        if (!(seen & 1 << what))
            return fsdpi_st_fail(r, "tensor '%t' has no '%a'",
                                 fsdpi_st_numbers(words[what], 0, 0, 0));
    return fsdpi_st_check_entry(r, e, &lists[0], &lists[1]);
}

static int fsdpi_st_read_metadata(fsdpi_st_parser *p) {
    fsdpi_st_reader *r = &p->r;
    fsdpi_st_string key, value;
    int64_t count = 0;
    int more;
    if (p->metadata++) return fsdpi_st_wrong(r, "at byte %p: '__metadata__' is there twice");
    if (fsdpi_st_peek(r) == 'n') return fsdpi_st_read_word(r, "null");
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &count, &key)) > 0) {
        if (!fsdpi_st_read_string(r, &value)) return 0;
        if (fsdpi_st_is(r, &key, FSDPI_ST_SHARDING)) {
            if (p->sharding.begin)
                return fsdpi_st_wrong(r, "at byte %p: '" FSDPI_ST_SHARDING "' is there twice");
            p->sharding = value;
        }
        if (fsdpi_st_is(r, &key, "fsdp.writer") && value.bytes < (int64_t)sizeof p->info->writer)
            fsdpi_st_copy(r, &value, p->info->writer, value.bytes);
    }
    return more == 0;
}

static int fsdpi_st_check_name(fsdpi_st_reader *r, const fsdpi_st_string *s) {
    char unit[4];
    int taken, size;
    int64_t at = r->at;
    r->name = *s;
    r->at = s->begin;
    if (!s->bytes) return fsdpi_st_wrong(r, "at byte %p: a name without bytes");
    if (s->bytes > FSDPI_ST_NAME)
        return fsdpi_st_fail(r, "at byte %p: a name of %0 bytes, at most %1",
                             fsdpi_st_numbers(NULL, s->bytes, FSDPI_ST_NAME, 0));
    for (; r->at < s->end; r->at += taken) {
        size = fsdpi_st_decode(r->text + r->at, s->end - r->at, unit, &taken);
        if (size == 1 && !unit[0]) return fsdpi_st_wrong(r, "at byte %p: a name with a NUL");
    }
    r->at = at;
    return 1;
}

// All members of the header.
static int fsdpi_st_read_header(fsdpi_st_parser *p) {
    fsdpi_st_reader *r = &p->r;
    fsdp_safetensors_entry measured, *e;
    fsdpi_st_string key;
    int64_t count = 0;
    int more;
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &count, &key)) > 0) {
        if (fsdpi_st_is(r, &key, "__metadata__")) {
            if (!fsdpi_st_read_metadata(p)) return 0;
            continue;
        }
        p->no_room = p->text && !p->entries;
        if (p->no_room) return 0;
        e = p->text ? &p->entries[p->num] : &measured;
        if (!fsdpi_st_check_name(r, &key) || !fsdpi_st_read_entry(r, e)) return 0;
        if (p->text) {
            e->name = p->text + p->names;
            fsdpi_st_copy(r, &key, p->text + p->names, key.bytes);
        }
        p->num++;
        p->names += key.bytes + 1;
    }
    if (more < 0) return 0;
    return fsdpi_st_peek(r) < 0 || fsdpi_st_expected(r, "nothing behind the header's '}'");
}

static int fsdpi_st_check_names(const fsdpi_st_parser *p, const fsdpi_st_sorted *s) {
    for (int64_t i = 1; i < s->n; i++) {
        const char *name = fsdpi_st_entry_at(s, i)->name;
        if (strcmp(name, fsdpi_st_entry_at(s, i - 1)->name) == 0)
            return fsdpi_st_fail(&p->r, "tensor '%a' is there twice",
                                 fsdpi_st_numbers(name, 0, 0, 0));
    }
    return 1;
}

static fsdp_safetensors_entry *fsdpi_st_find(const fsdpi_st_sorted *s, const char *name) {
    int64_t low = 0, high = s->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(fsdpi_st_entry_at(s, middle)->name, name);
        if (order == 0) return fsdpi_st_entry_at(s, middle);
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

static int fsdpi_st_check_box(const fsdpi_st_reader *r, fsdp_safetensors_entry *e,
                              const fsdpi_st_list *start, const fsdpi_st_list *whole) {
    fsdpi_st_facts f = {e->name, NULL, {start->count, e->ndim, 0, 0}, e};
    if (start->count != e->ndim)
        return fsdpi_st_fail(r, "tensor '%a': saved_offsets has %0 numbers for %1 dims", f);
    f.n[0] = whole ? whole->count : e->ndim;
    if (f.n[0] != e->ndim)
        return fsdpi_st_fail(r, "tensor '%a': global_shape has %0 numbers for %1 dims", f);
    for (int d = 0; d < e->ndim && d < FSDP_MAX_DIMS; d++) {
        int64_t most = whole ? whole->v[d] : FSDPI_ST_MOST;
        f.n[0] = start->v[d], f.n[1] = f.n[0] + e->shape[d], f.n[2] = most, f.n[3] = d;
        if (e->shape[d] > most || start->v[d] > most - e->shape[d])
            return fsdpi_st_fail(r, "tensor '%a': %0..%1 of %2 in dim %3", f);
    }
    memcpy(e->start, start->v, sizeof e->start);
    if (whole) memcpy(e->whole, whole->v, sizeof e->whole);
    return 1;
}

// What the sharding info tells of one tensor.
static int fsdpi_st_read_box(fsdpi_st_reader *r, fsdp_safetensors_entry *e) {
    static const char *const words[] = {"saved_offsets", "global_shape"};
    fsdpi_st_list lists[2];
    fsdpi_st_string key;
    int64_t count = 0;
    int seen = 0, more;
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &count, &key)) > 0) {
        int what = fsdpi_st_is(r, &key, words[0]) ? 0 : fsdpi_st_is(r, &key, words[1]) ? 1 : 2;
        if (seen & 1 << what & 3) {
            fsdpi_st_facts f = fsdpi_st_numbers(e->name, 0, 0, 0);
            f.b = words[what];
            return fsdpi_st_fail(r, "at byte %p: tensor '%a' has '%b' twice", f);
        }
        seen |= 1 << what;
        if (!(what < 2 ? fsdpi_st_read_list(r, &lists[what]) : fsdpi_st_skip(r, 2))) return 0;
    }
    if (more < 0) return 0;
    if (!(seen & 1))
        return fsdpi_st_fail(r, "tensor '%a' has no 'saved_offsets'",
                             fsdpi_st_numbers(e->name, 0, 0, 0));
    return fsdpi_st_check_box(r, e, &lists[0], seen & 2 ? &lists[1] : NULL);
}

// The sharding info is a text inside of a text: without its escapes it stands in the caller's room,
// and so do the names in it.
static int fsdpi_st_read_sharding(fsdpi_st_parser *p, const fsdpi_st_sorted *s) {
    char *room = p->text + p->names;
    fsdpi_st_reader r = {(const unsigned char *)room, p->sharding.bytes, 0, 0, "", p->r.name, NULL};
    fsdpi_st_string key;
    int64_t count = 0;
    int more;
    r.inside = FSDPI_ST_SHARDING ": ", r.why = p->r.why;
    fsdpi_st_copy(&p->r, &p->sharding, room, p->sharding.bytes);
    for (int64_t i = 0; i < p->num; i++) p->entries[i].start[0] = -1; // not told yet
    if (!fsdpi_st_took(&r, '{')) return fsdpi_st_expected(&r, "'{'");
    while ((more = fsdpi_st_read_member(&r, &count, &key)) > 0) {
        char *name = room + key.begin;
        fsdpi_st_copy(&r, &key, name, key.bytes);
        fsdp_safetensors_entry *e = (int64_t)strlen(name) == key.bytes ? fsdpi_st_find(s, name)
                                                                       : NULL;
        if (!e)
            return fsdpi_st_fail(&r, "'%a' is no tensor of the file",
                                 fsdpi_st_numbers(name, 0, 0, 0));
        if (e->start[0] >= 0)
            return fsdpi_st_fail(&r, "tensor '%a' is there twice", fsdpi_st_numbers(name, 0, 0, 0));
        if (!fsdpi_st_read_box(&r, e)) return 0;
    }
    if (more < 0) return 0;
    if (fsdpi_st_peek(&r) >= 0) return fsdpi_st_expected(&r, "nothing behind its '}'");
    for (int64_t i = 0; i < p->num; i++)
        if (p->entries[i].start[0] < 0)
            return fsdpi_st_fail(&r, "tensor '%a' is missing",
                                 fsdpi_st_numbers(p->entries[i].name, 0, 0, 0));
    return 1;
}

// Entries in the order of their bytes: these have to lie one behind another, up to the end.
static int fsdpi_st_check_places(const fsdpi_st_parser *p) {
    fsdpi_st_facts f = fsdpi_st_numbers(NULL, 0, 0, 0);
    int64_t end = 0;
    for (int64_t i = 0; i < p->num; i++, end = f.n[1]) {
        const fsdp_safetensors_entry *e = &p->entries[i];
        f.n[0] = e->begin, f.n[1] = e->end;
        if (e->begin > end) {
            f.n[0] = end, f.n[1] = e->begin;
            return fsdpi_st_fail(&p->r, "bytes %0..%1 of the data are in no tensor", f);
        }
        if (e->begin < end) { // then it is not the first one
            f.a = e[-1].name, f.b = e->name;
            if (end < f.n[1]) f.n[1] = end;
            return fsdpi_st_fail(&p->r, "'%a' and '%b' both take bytes %0..%1", f);
        }
    }
    f.n[0] = p->data_bytes, f.n[1] = end;
    if (end > p->data_bytes)
        return fsdpi_st_fail(&p->r, "is cut off: %0 bytes of data, the header tells %1", f);
    if (end < p->data_bytes)
        return fsdpi_st_fail(&p->r, "has %0 bytes of data, the header tells %1", f);
    return 1;
}

static int fsdpi_st_parse(fsdpi_st_parser *p) {
    fsdpi_st_reader *r = &p->r;
    int64_t sharding;
    if (r->size > FSDPI_ST_HEADER)
        return fsdpi_st_fail(r, "header of %0 bytes, at most %1",
                             fsdpi_st_numbers(NULL, r->size, FSDPI_ST_HEADER, 0));
    r->at = fsdpi_st_utf8(r->text, r->size);
    if (r->at < r->size) return fsdpi_st_wrong(r, "at byte %p: %g is no UTF-8");
    r->at = 0;
    if (!fsdpi_st_read_header(p)) return 0;
    sharding = p->sharding.begin ? p->sharding.bytes + 1 : 0;
    p->info->num_entries = p->num;
    p->info->text_bytes = p->names + sharding + 4 * p->num + 1; // never 0
    p->info->has_sharding = p->sharding.begin != 0;
    if (p->text) {
        fsdpi_st_sorted s = {p->entries, p->text + p->names + sharding, p->num, fsdpi_st_by_name};
        for (uint32_t i = 0; i < p->num; i++) memcpy(s.index + 4 * (int64_t)i, &i, 4);
        fsdpi_st_sort(&s);
        if (!fsdpi_st_check_names(p, &s)) return 0;
        if (sharding && !fsdpi_st_read_sharding(p, &s)) return 0;
        s.index = NULL, s.before = fsdpi_st_by_place;
        fsdpi_st_sort(&s);
    }
    return (p->num && !p->text) || fsdpi_st_check_places(p);
}

FSDP_API fsdp_status fsdp_safetensors_header_bytes(const void *first, int64_t file_bytes,
                                                   int64_t *header_bytes, char *why,
                                                   size_t why_cap) {
    fsdpi_st_out o = fsdpi_st_why(why, why_cap);
    fsdpi_st_reader r = {NULL, 0, 0, 0, "", {0, 0, 0}, &o};
    fsdpi_st_facts f = fsdpi_st_numbers(NULL, file_bytes, 8, 0);
    int ok = 1;
    uint64_t size;
    fsdpi_st_end(&o);
    if (file_bytes < 0 || !header_bytes || (!first && file_bytes >= 8)) return FSDP_ERR_INVALID_ARG;
    *header_bytes = 0;
    size = file_bytes < 8 ? 0 : fsdpi_st_little_endian((const unsigned char *)first);
    if (file_bytes < 8) {
        ok = fsdpi_st_fail(&r, "has %0 bytes, expected at least %1", f);
    } else if (size > FSDPI_ST_HEADER) {
        f.n[0] = (int64_t)size, f.n[1] = FSDPI_ST_HEADER;
        ok = fsdpi_st_fail(&r, "header of %0 bytes, at most %1", f);
    } else if ((int64_t)size > file_bytes - 8) {
        f.n[0] = file_bytes - 8, f.n[1] = (int64_t)size;
        ok = fsdpi_st_fail(&r, "is cut off: %0 bytes behind the first 8, a header of %1", f);
    } else {
        *header_bytes = (int64_t)size;
    }
    fsdpi_st_end(&o);
    return ok ? FSDP_OK : FSDP_ERR_CORRUPT;
}

FSDP_API fsdp_status fsdp_safetensors_parse(const char *header, int64_t header_bytes,
                                            int64_t data_bytes, fsdp_safetensors_entry *entries,
                                            char *text, fsdp_safetensors_info *info, char *why,
                                            size_t why_cap) {
    fsdpi_st_out o = fsdpi_st_why(why, why_cap);
    fsdpi_st_parser p;
    fsdpi_st_end(&o);
    if (!header || header_bytes < 0 || data_bytes < 0 || !info || (entries && !text))
        return FSDP_ERR_INVALID_ARG;
    memset(&p, 0, sizeof p);
    memset(info, 0, sizeof *info);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return FSDP_ERR_UNSUPPORTED; // the format is little-endian
#endif
    p.r.text = (const unsigned char *)header, p.r.size = header_bytes;
    p.r.origin = 8, p.r.inside = "", p.r.why = &o;
    p.entries = entries, p.text = text, p.data_bytes = data_bytes, p.info = info;
    if (fsdpi_st_parse(&p)) return FSDP_OK;
    fsdpi_st_end(&o);
    memset(info, 0, sizeof *info);
    return p.no_room ? FSDP_ERR_INVALID_ARG : FSDP_ERR_CORRUPT;
}

/* -------------------------------------------------------------------------------------------- */
// Owns: writing headers.

static int fsdpi_st_escape(char c, char *out) {
    static const char meant[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    static const char hex[] = "0123456789abcdef";
    const char *at = c ? strchr(meant, c) : NULL;
    unsigned char u = (unsigned char)c;
    if (at) {
        out[0] = '\\', out[1] = letters[at - meant];
        return 2;
    }
    out[0] = c;
    if (u >= 0x20) return 1;
    memcpy(out, "\\u00", 4);
    out[4] = hex[u >> 4], out[5] = hex[u & 15];
    return 6;
}

// A string in quotes; `twice`: in a text that is itself a string's.
static void fsdpi_st_put_string(fsdpi_st_out *o, const char *s, int twice) {
    const char *quote = twice ? "\\\"" : "\"";
    char once[6], again[6];
    fsdpi_st_puts(o, quote);
    for (; *s; s++) {
        int n = fsdpi_st_escape(*s, once);
        if (!twice) fsdpi_st_put(o, once, n);
        for (int i = 0; i < n && twice; i++)
            fsdpi_st_put(o, again, fsdpi_st_escape(once[i], again));
    }
    fsdpi_st_puts(o, quote);
}

// Was the shape of the whole told? If it is all 0, then only if the box lies in such a tensor.
static int fsdpi_st_is_told(const fsdp_safetensors_entry *e) {
    int64_t whole = 0, box = 0;
    for (int d = 0; d < e->ndim; d++) whole |= e->whole[d], box |= e->start[d] | e->shape[d];
    return whole || !box;
}

static int fsdpi_st_is_text(const char *s) {
    int64_t n = s ? (int64_t)strlen(s) : -1;
    return n >= 0 && fsdpi_st_utf8((const unsigned char *)s, n) == n;
}

// Checks an entry that is to be written, and sets its dtype and the bytes that it takes.
static int fsdpi_st_check_printed(fsdp_safetensors_entry *e, int sharded) {
    uint64_t numel = 1;
    if (!fsdpi_st_is_text(e->name) || !e->name[0] || strlen(e->name) > FSDPI_ST_NAME ||
        strcmp(e->name, "__metadata__") == 0)
        return 0;
    if (!fsdp_dtype_size(e->dtype) || e->ndim < 0 || e->ndim > FSDP_MAX_DIMS) return 0;
    for (e->file_dtype = 0; fsdpi_st_dtypes[e->file_dtype].dtype != e->dtype;) e->file_dtype++;
    for (int d = 0; d < e->ndim; d++) {
        int64_t size = e->shape[d], most = FSDPI_ST_MOST;
        if (size < 0 || size > most || !fsdpi_st_numel(&numel, (uint64_t)size)) return 0;
        if (!sharded) continue;
        if (fsdpi_st_is_told(e)) most = e->whole[d];
        if (most < 0 || most > FSDPI_ST_MOST || size > most || e->start[d] < 0 ||
            e->start[d] > most - size)
            return 0;
    }
    if (!fsdpi_st_numel(&numel, fsdpi_st_dtypes[e->file_dtype].bits)) return 0;
    e->begin = 0, e->end = (int64_t)(numel / 8);
    return 1;
}

static int fsdpi_st_check_pairs(const char *const *keys, const char *const *values, int num) {
    if (num < 0 || (num > 0 && (!keys || !values))) return 0;
    for (int i = 0; i < num; i++)
        if (!fsdpi_st_is_text(keys[i]) || !fsdpi_st_is_text(values[i]) ||
            strcmp(keys[i], FSDPI_ST_SHARDING) == 0 || (i && strcmp(keys[i - 1], keys[i]) >= 0))
            return 0;
    return 1;
}

static void fsdpi_st_put_sharding(fsdpi_st_out *o, const fsdp_safetensors_entry *entries,
                                  int64_t num) {
    fsdpi_st_puts(o, "\"" FSDPI_ST_SHARDING "\":\"{");
    for (int64_t i = 0; i < num; i++) {
        const fsdp_safetensors_entry *e = &entries[i];
        if (i) fsdpi_st_puts(o, ",");
        fsdpi_st_put_string(o, e->name, 1);
        fsdpi_st_puts(o, ":{\\\"saved_offsets\\\":");
        fsdpi_st_put_list(o, e->ndim, e->start, ",");
        if (fsdpi_st_is_told(e)) {
            fsdpi_st_puts(o, ",\\\"global_shape\\\":");
            fsdpi_st_put_list(o, e->ndim, e->whole, ",");
        }
        fsdpi_st_puts(o, "}");
    }
    fsdpi_st_puts(o, "}\"");
}

static void fsdpi_st_put_header(fsdpi_st_out *o, const fsdp_safetensors_entry *entries, int64_t num,
                                int sharded, const char *const *keys, const char *const *values,
                                int num_pairs) {
    int written = 0, members = 0;
    fsdpi_st_puts(o, "{");
    if (sharded || num_pairs) {
        fsdpi_st_puts(o, "\"__metadata__\":{");
        for (int i = 0; i <= num_pairs; i++) {
            if (sharded && !written && (i == num_pairs || strcmp(keys[i], FSDPI_ST_SHARDING) > 0)) {
                if (members++) fsdpi_st_puts(o, ",");
                fsdpi_st_put_sharding(o, entries, num);
                written = 1;
            }
            if (i == num_pairs) break;
            if (members++) fsdpi_st_puts(o, ",");
            fsdpi_st_put_string(o, keys[i], 0);
            fsdpi_st_puts(o, ":");
            fsdpi_st_put_string(o, values[i], 0);
        }
        fsdpi_st_puts(o, "}");
    }
    for (int64_t i = 0; i < num; i++) {
        const fsdp_safetensors_entry *e = &entries[i];
        const int64_t bytes[2] = {e->begin, e->end};
        if (i || members) fsdpi_st_puts(o, ",");
        fsdpi_st_put_string(o, e->name, 0);
        fsdpi_st_puts(o, ":{\"dtype\":\"");
        fsdpi_st_puts(o, fsdpi_st_dtypes[e->file_dtype].name);
        fsdpi_st_puts(o, "\",\"shape\":");
        fsdpi_st_put_list(o, e->ndim, e->shape, ",");
        fsdpi_st_puts(o, ",\"data_offsets\":");
        fsdpi_st_put_list(o, 2, bytes, ",");
        fsdpi_st_puts(o, "}");
    }
    fsdpi_st_puts(o, "}");
    while (o->used % 8) fsdpi_st_puts(o, " ");
}

FSDP_API int64_t fsdp_safetensors_print(fsdp_safetensors_entry *entries, int64_t num, int sharded,
                                        const char *const *keys, const char *const *values,
                                        int num_pairs, char *buf, int64_t cap) {
    fsdpi_st_sorted s = {entries, NULL, num, fsdpi_st_by_name};
    fsdpi_st_out o = {buf, buf && cap > 0 ? cap : 0, 0};
    int64_t end = 0;
    if (num < 0 || (num && !entries) || !fsdpi_st_check_pairs(keys, values, num_pairs)) return -1;
    for (int64_t i = 0; i < num; i++)
        if (!fsdpi_st_check_printed(&entries[i], sharded)) return -1;
    fsdpi_st_sort(&s); // equal names stand together, whatever their dtypes are
    for (int64_t i = 1; i < num; i++)
        if (strcmp(entries[i - 1].name, entries[i].name) == 0) return -1;
    s.before = fsdpi_st_by_file;
    fsdpi_st_sort(&s);
    for (int64_t i = 0; i < num; i++) {
        if (entries[i].end > FSDPI_ST_MOST - end) return -1;
        entries[i].begin = end;
        end = entries[i].end += end;
    }
    fsdpi_st_put_header(&o, entries, num, sharded, keys, values, num_pairs);
    return o.used > FSDPI_ST_HEADER ? -1 : o.used;
}

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION


/* ==== fsdp_checkpoint.h, continued ========================================================== */

#ifndef FSDP_CHECKPOINT_H
#define FSDP_CHECKPOINT_H

#ifdef __cplusplus
extern "C" {
#endif
// clang-format off

typedef struct fsdp_checkpoint fsdp_checkpoint;
enum { FSDP_CHECKPOINT_NAME = 512, FSDP_CHECKPOINT_SOURCES = 8, FSDP_CHECKPOINT_PATH = 4096 };

/* The file calls, as functions that return 0 or an errno value: a test injects faults, a program
   keeps checkpoints elsewhere. The library calls them from the caller's thread or from one worker
   thread of the object, one call at a time. */
typedef struct fsdp_file_ops {
    uint32_t version, size; // 1, sizeof(fsdp_file_ops)
    // create 1: for writing; EEXIST if it is there. 0: for reading, regular files only; never waits
    int (*open)(void *user, const char *path, int create, void **file, int64_t *nbytes);
    int (*read)(void *user, void *file, void *data, int64_t nbytes, int64_t at,
                int64_t *done);                          // may be short; 0 bytes: the end
    int (*write)(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                 int64_t *done);                         // may be short
    int (*sync)(void *user, void *file);                 // on the disk when it returns
    int (*close)(void *user, void *file);
    int (*make_dir)(void *user, const char *path);       // EEXIST if it is there
    int (*sync_dir)(void *user, const char *path);       // the names in it are on the disk
    int (*rename)(void *user, const char *from, const char *to); // fails if `to` is there
    // is_dir 0: a file; a link itself; EISDIR for a directory. 1: an empty directory
    int (*remove)(void *user, const char *path, int is_dir);
    int (*list)(void *user, const char *path, int (*each)(void *arg, const char *name), void *arg);
} fsdp_file_ops;

// Memory of yours that belongs to a checkpoint: the place in the data, random numbers, a schedule.
// Save reads it before it returns, load writes it.
typedef struct fsdp_checkpoint_blob {
    const char *name;  // [A-Za-z0-9_.-]{1,64}
    void *data;
    int64_t nbytes;    // load wants as many
    int32_t per_rank;  // 1: each rank has its own. 0: rank 0's, which load gives to all ranks
    int32_t optional;  // 1: load leaves it as it is if the checkpoint has none
} fsdp_checkpoint_blob;

// How a parameter is called in files, and where this rank's part lies in the whole tensor.
typedef struct fsdp_checkpoint_place {
    char name[FSDP_CHECKPOINT_NAME];   // in: see NAMES. out: "" leaves the parameter out. UTF-8
    int64_t shape[FSDP_MAX_DIMS];      // in: the parameter's. out: the whole tensor's
    int64_t start[FSDP_MAX_DIMS];      // in: 0. out: where the parameter begins in the whole
    int32_t replica, num_replicas;     // in: 0, 1. out: groups of ranks beside the unit's mesh that
                                       // hold the same, and which one this rank is in
} fsdp_checkpoint_place;
typedef void (*fsdp_checkpoint_place_fn)(void *user, const fsdp_param_view *param,
                                         fsdp_checkpoint_place *place);

typedef struct fsdp_checkpoint_desc {
    uint32_t size, start_canary;
    fsdp_checkpoint_place_fn place;    // NULL: a parameter is the whole tensor. With tensor
                                       // parallelism call fsdp_tp_view in it
    const fsdp_checkpoint_blob *blobs; // [num_blobs], copied, but not what they point at
    int32_t num_blobs;
    int32_t skip_frozen;               // 1: frozen parameters are neither saved nor asked for
    int32_t param_names;               // 1: names of parameters alone (fsdp_replicate.h, whose
                                       // units are buckets)
    int32_t no_sync;                   // 1: no fsync: see WHAT IT PROMISES
    int32_t keep, keep_every;          // keep > 0: so many newest checkpoints stay, and those whose
                                       // step is a multiple of keep_every. Then one job at a time
                                       // owns the directory
    int32_t stall_ms;                  // a rank whose file call makes no progress for so long fails
                                       // the call. 0: 600,000
    int32_t reserved;
    int64_t stage_bytes;               // host memory that a save may take for copies. 0: what
                                       // save_async needs to return at once, see there
    const fsdp_file_ops *files;        // NULL: the operating system
    void *files_user, *user;           // user: of place
    uint64_t end_canary;
} fsdp_checkpoint_desc;

/* fsdp_checkpoint_create - say what save and load of a model mean; commits the model
   desc        NULL: defaults
   ck          the model owns it: it ends with fsdp_checkpoint_destroy or the model
   Result      FSDP_OK; INVALID_ARG (the text names the field, the blob or the parameter: two of one
               name, no name, a name that is not UTF-8, that is "__metadata__" or begins with
               "optim.state." or "fsdp.", a place outside of the whole), UNSUPPORTED (a host that is
               not little endian), OUT_OF_MEMORY, errors of commit. It fails on all ranks or on none
   Collective  yes: every rank of the world, each with its own model      Blocks no
   Allocates   tables      Source torch: torch.distributed.checkpoint, get_state_dict */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_create(fsdp_model *model,
                                                            const fsdp_checkpoint_desc *desc,
                                                            fsdp_checkpoint **ck);

/* fsdp_checkpoint_destroy - end it; NULL is allowed. A save that nobody has waited for is given up:
   its directory with a name that begins with a dot stays
   Collective  no      Blocks for the worker's file call under way, at most stall_ms
   Allocates   no */
FSDP_API void fsdp_checkpoint_destroy(fsdp_checkpoint *ck);

/* fsdp_checkpoint_save       - write DIR/step-NNNNNNNN and return when it is complete
   fsdp_checkpoint_save_async - return when everything is copied; from then on you may change it.
               poll or wait completes the save. If an earlier one is under way, it is completed
               first
   fsdp_checkpoint_poll       - go on with a save under way without waiting for files. busy: out: 1:
               it is not complete yet; may be NULL
   fsdp_checkpoint_wait       - complete the save under way
   dir         made if it is not there, but not its parent; equal on all ranks. step, too: 0 to 2^62
   Result      FSDP_OK (poll, wait: also if no save is under way). The same failure on every rank:
               MISMATCH (dir or step differ between ranks; the text says how), INVALID_STATE (a unit
               is not idle, or holds gradients that are not reduced), INVALID_ARG (the step is there
               already; ranks or replicas write the same rows: the text names the tensor), IO,
               OUT_OF_MEMORY: there is no such checkpoint, nothing of it is left if files can be
               removed, and the world goes on. Collective errors
   Collective  yes: every rank of the world
   Blocks      save: until it is complete. save_async: until everything is copied; if stage_bytes is
               less than what this rank writes, until the rest is written. poll: no longer than the
               collectives
   Allocates   at the first use: save on host memory: tables only. On devices 8 MiB for copies, or
               stage_bytes if less. save_async: what this rank writes, or stage_bytes if less
   Source      torch: torch.distributed.checkpoint.save, async_save */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_save(fsdp_checkpoint *ck, const char *dir,
                                                          int64_t step);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_save_async(fsdp_checkpoint *ck,
                                                                const char *dir, int64_t step);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_poll(fsdp_checkpoint *ck, int *busy);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_wait(fsdp_checkpoint *ck);

/* fsdp_checkpoint_find - the newest complete checkpoint in dir: its manifest is right, and its
               files are there with their sizes
   max_step    not newer than this step; -1: any
   path        out: [cap] the checkpoint for load; "" if there is none
   step        out: its step; -1 if there is none (that is no failure)
   Result      FSDP_OK; INVALID_ARG, IO, OUT_OF_MEMORY, the same on every rank; collective errors
   Collective  yes: every rank of the world; rank 0 looks, all get its answer
   Blocks      while files are read      Allocates while it runs */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_find(fsdp_checkpoint *ck, const char *dir,
                                                          int64_t max_step, char *path, size_t cap,
                                                          int64_t *step);

// Where a parameter comes from in files of others.
typedef struct fsdp_checkpoint_source {
    char name[FSDP_CHECKPOINT_NAME];   // in: of the first: the name in files of ours
    int32_t transpose, reserved;       // 1: a matrix that is stored the other way round
    int64_t first, rows;               // rows of dim 0, after transposing; rows 0: all
} fsdp_checkpoint_source;
// Returns how many sources, 1..FSDP_CHECKPOINT_SOURCES: one under the other they are the whole
// tensor. 0: the parameter keeps its value. out is zeroed but for out[0].name.
typedef int (*fsdp_checkpoint_source_fn)(void *user, const fsdp_param_view *param,
                                         fsdp_checkpoint_source *out);

enum { FSDP_VERIFY_READ = 0, FSDP_VERIFY_ALL, FSDP_VERIFY_NONE };

typedef struct fsdp_checkpoint_load_desc {
    uint32_t size, start_canary;
    int32_t params_only;               // 1: no states of extensions, no blobs
    int32_t partial;                   // 1: what the checkpoint lacks keeps its value
    int32_t convert;                   // 1: floating dtypes may differ
    int32_t verify;                    // READ: checksums of the blocks that this rank reads as a
                                       // whole. ALL: first of all blocks, shared by the ranks
    fsdp_checkpoint_source_fn source;  // NULL: names of ours. With it states are not loaded
    void *user;                        // of source
    uint64_t end_canary;
} fsdp_checkpoint_load_desc;

/* fsdp_checkpoint_load - fill parameters, states of extensions and blobs; ends with
               fsdp_params_changed
   path        a checkpoint directory of ours, one of PyTorch's in safetensors form, a directory of
               Hugging Face, or one .safetensors file; equal on all ranks
   desc        NULL: defaults. Equal on all ranks: params_only, verify, whether there is a source
   States      if a parameter has no state in the checkpoint although others have (it was frozen, or
               never updated), its states become zero
   Result      FSDP_OK; the same failure on every rank. MISMATCH: what has to be equal on all ranks
               differs; the text says what. INVALID_ARG: it is of another model: the text names what
               is missing or has another shape or dtype. INVALID_STATE: a unit is
               not idle. UNSUPPORTED: a format that it does not read. OUT_OF_MEMORY. CORRUPT, IO.
               If the failure is found before the first parameter is read, nothing has changed; if
               a file fails while it is read, parameters and states are undefined. Collective errors
   Collective  yes: every rank of the world      Blocks while files are read
   Allocates   while it runs: the headers of all files, tables, 8 MiB
   Source      torch: torch.distributed.checkpoint.load, set_state_dict */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *ck, const char *path,
                                                          const fsdp_checkpoint_load_desc *desc);

typedef struct fsdp_checkpoint_report { // of the last save or load of an object
    int64_t step;                       // save: the step. load: that of the manifest, else -1
    int64_t bytes, total_bytes;         // data: written or read by this rank; in the whole
    int64_t blocked_ns, total_ns;       // how long the call took; and save_async to its completion
    int64_t num_reads;                  // load: file calls that read data
    int32_t num_missing, num_extra;     // load: tensors that partial left as they were, and those
                                        // that nobody asked for
    int32_t per_rank_blobs;             // load: 1: blobs of each rank were loaded (or there are
                                        // none): the checkpoint is of as many ranks
    int32_t verified;                   // load: 1: checksums of all bytes that were read are right
} fsdp_checkpoint_report;

/* fsdp_checkpoint_last_report - of the last save or load that succeeded
   fsdp_checkpoint_nbytes      - host memory for copies that a save_async takes on this rank, tables
               left out
   Result      report: FSDP_OK; INVALID_ARG. nbytes: -1 for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_checkpoint_last_report(const fsdp_checkpoint *ck,
                                                 fsdp_checkpoint_report *out);
FSDP_API int64_t fsdp_checkpoint_nbytes(fsdp_checkpoint *ck);

/* Without a world, in one process: what tools/fsdpck does. All of these calls:
   path        as for load
   files       NULL: the operating system
   text        [cap] out: why it failed; else "". May be NULL. Nothing is logged
   Collective  no: one process, without or with a world. In a running job the other ranks wait
   Thread any: one at a time for the same reader */

typedef struct fsdp_checkpoint_reader fsdp_checkpoint_reader;

typedef struct fsdp_checkpoint_contents {
    int64_t step;                       // of the manifest; -1: there is none
    int64_t world;                      // ranks whose blobs it has; 0: not told
    int64_t num_files, num_tensors, num_boxes;
    int64_t data_bytes;                 // of all files, without headers
    int32_t has_checksums, reserved;
} fsdp_checkpoint_contents;

typedef struct fsdp_checkpoint_tensor { // a whole tensor, in however many boxes
    const char *name;                   // as strangers wrote it; lives as long as the reader
    fsdp_dtype dtype;                   // FSDP_SAFETENSORS_OTHER: it cannot be read
    int32_t ndim, file_dtype;           // file_dtype: for fsdp_safetensors_dtype_name
    int32_t num_boxes;                  // copies count once
    int64_t shape[FSDP_MAX_DIMS], nbytes;
} fsdp_checkpoint_tensor;

/* fsdp_checkpoint_open  - read and check manifest, index and headers: coverage of every tensor, too
   fsdp_checkpoint_close - NULL is allowed
   reader      out: you own it: end it with fsdp_checkpoint_close. NULL after a failure
   Result      FSDP_OK; CORRUPT, IO, UNSUPPORTED, INVALID_ARG, OUT_OF_MEMORY
   Collective  no      Blocks while headers are read      Allocates headers, tables, 5 MiB */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_open(const char *path,
                                                          const fsdp_file_ops *files,
                                                          void *files_user,
                                                          fsdp_checkpoint_reader **reader,
                                                          char *text, size_t cap);
FSDP_API void fsdp_checkpoint_close(fsdp_checkpoint_reader *reader);

/* fsdp_checkpoint_contents_of - what there is
   fsdp_checkpoint_tensor_at   - a tensor: 0 .. num_tensors - 1, by the bytes of their names
   Result      FSDP_OK; INVALID_ARG (NULL, no such tensor)
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_checkpoint_contents_of(const fsdp_checkpoint_reader *reader,
                                                 fsdp_checkpoint_contents *out);
FSDP_API fsdp_status fsdp_checkpoint_tensor_at(const fsdp_checkpoint_reader *reader, int64_t index,
                                               fsdp_checkpoint_tensor *out);

/* fsdp_checkpoint_read - a box of a tensor, row-major; checksums of the blocks that it touches are
               checked
   start, shape  [ndim] in the tensor; both NULL: all of it
   dtype       KEEP: as it is; a floating tensor as another floating dtype is converted
   to          out: room for the box, aligned to dtype
   Result      FSDP_OK; CORRUPT, IO; UNSUPPORTED (a dtype or dims that the library does not have);
               INVALID_ARG; OUT_OF_MEMORY. After a failure the content of `to` is undefined
   Collective  no      Blocks while files are read      Allocates tables */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_read(fsdp_checkpoint_reader *reader,
                                                          int64_t index, const int64_t *start,
                                                          const int64_t *shape, fsdp_dtype dtype,
                                                          void *to, char *text, size_t cap);

typedef struct fsdp_checkpoint_export_desc {
    uint32_t size, start_canary;
    fsdp_dtype dtype;                   // of floating tensors, states left out; KEEP: as they are
    int32_t with_optimizer;             // 0: no names that begin with "optim." or "fsdp.". With
                                        // num_ranks they are always written
    int32_t num_ranks, reserved;        // > 0: a checkpoint of ours in so many data files
    int64_t max_file_bytes;             // a file holds so many bytes of data, or one larger tensor.
                                        // 0: 5,000,000,000
                                        // Not with num_ranks
    // The name there: 1, out is [FSDP_CHECKPOINT_NAME]. 0: leave the tensor out. NULL: as it is.
    int (*rename)(void *user, const char *name, char *out);
    void *user;
    const fsdp_file_ops *files;         // NULL: the operating system
    void *files_user;
    uint64_t end_canary;
} fsdp_checkpoint_export_desc;

/* fsdp_checkpoint_verify - check manifest, headers, coverage of every tensor, and every checksum
   fsdp_checkpoint_export - write the tensors to a new directory.
               In the form of Hugging Face: model.safetensors, the bytes that safetensors' save_file
               writes; or model-0000i-of-0000n.safetensors and an index, split as huggingface_hub
               splits tensors in the order of their names.
               With num_ranks as a checkpoint of ours: each file has its rows of every tensor;
               tensors with few rows or bytes are in one file. The step is that of the name
               step-NNNNNNNN of out, else that of path, else 0. Blobs stay those of the ranks that
               saved them
   out         made; its parent must be there. It gets its name when it is complete
   text        verify: also what was checked, if nothing is wrong
   Result      FSDP_OK; CORRUPT, IO, UNSUPPORTED (a dtype that the library does not have),
               INVALID_ARG (out is there already; two tensors of one name; nothing to write),
               OUT_OF_MEMORY. After a failure out is not there, and nothing beside it if files can
               be removed. Only if the last sync of its parent fails (IO) it is there
   Collective  no      Blocks while files are read and written      Allocates headers, tables, 9 MiB
   Source      torch: consolidate_safetensors_files */
FSDP_API fsdp_status fsdp_checkpoint_verify(const char *path, const fsdp_file_ops *files,
                                            void *files_user, char *text, size_t cap);
FSDP_API fsdp_status fsdp_checkpoint_export(const char *path, const char *out,
                                            const fsdp_checkpoint_export_desc *desc, char *text,
                                            size_t cap);

// clang-format on
#ifdef __cplusplus
}
#endif
#endif // FSDP_CHECKPOINT_H

/* ============================================================================================ */
/* Implementation, leaves first. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_CHECKPOINT_IMPLEMENTED)
#define FSDP_CHECKPOINT_IMPLEMENTED

#include <errno.h>       // errno, EEXIST, ENOENT
#include <pthread.h>     // one worker thread
#include <signal.h>      // SIGXFSZ
#include <stdio.h>       // snprintf
#include <stdlib.h>      // qsort; calloc where there is no model
#include <string.h>      // memcpy, memcmp, strlen, strerror
#include <dirent.h>      // opendir, readdir
#include <fcntl.h>       // open
#include <sys/stat.h>    // fstat, mkdir
#include <sys/syscall.h> // SYS_futex
#include <unistd.h>      // close, rmdir, unlink
#ifdef __SSE2__
#include <emmintrin.h> // _mm_stream_si128
#endif

#ifdef __cplusplus
extern "C" {
#endif


/* ==== checkpoint/files.h ====================================================================
   the file calls of the operating system, and one file call as data */

// Owns: the default fsdp_file_ops. Strict C99 hides three functions of unistd.h; private names for
// the C library's symbols reach them.

extern ssize_t fsdpi_ck_pread(int fd, void *buf, size_t count, int64_t at) __asm__("pread64");
extern ssize_t fsdpi_ck_pwrite(int fd, const void *buf, size_t count,
                               int64_t at) __asm__("pwrite64");
extern int fsdpi_ck_fsync(int fd) __asm__("fsync");

enum {
    FSDPI_CK_O_CLOEXEC = 02000000, // what fcntl.h hides in strict C99
    FSDPI_CK_PIECE = 4 << 20,      // bytes of one file call, and of a copy through memory
    FSDPI_CK_BLOCK = 1 << 20,      // bytes of data that share a checksum
    FSDPI_CK_LEAF = 96,            // a name in a directory that is ours, with its end
    FSDPI_CK_MOST_HEADER = 100000000,
    FSDPI_CK_MOST_TEXT = 64 << 20, // bytes of a manifest or an index
    FSDPI_CK_MOST_FILES = 1000000
};

static int64_t fsdpi_ck_less(int64_t a, int64_t b) { return a < b ? a : b; }

static int fsdpi_ck_fd(void *file) { return (int)(intptr_t)file - 1; }

// open(2); the descriptor is none of 0 to 2, where a program prints though they are closed.
static int fsdpi_ck_open_fd(const char *path, int flags) {
    int fd = open(path, flags | FSDPI_CK_O_CLOEXEC, 0666);
    if (fd < 0 || fd > 2) return fd;
    int moved = fcntl(fd, 1030 /* F_DUPFD_CLOEXEC */, 3), error = errno;
    (void)close(fd);
    errno = error;
    return moved;
}

static int fsdpi_ck_os_open(void *user, const char *path, int create, void **file,
                            int64_t *nbytes) {
    struct stat st;
    (void)user;
    int fd = fsdpi_ck_open_fd(path, create ? O_WRONLY | O_CREAT | O_EXCL : O_RDONLY | O_NONBLOCK);
    if (fd < 0) return errno;
    int error = fstat(fd, &st) ? errno : !S_ISREG(st.st_mode) ? EINVAL : 0;
    if (error) {
        (void)close(fd);
        return error;
    }
    *nbytes = (int64_t)st.st_size;
    *file = (void *)(intptr_t)(fd + 1);
    return 0;
}
static int fsdpi_ck_os_read(void *user, void *file, void *data, int64_t nbytes, int64_t at,
                            int64_t *done) {
    (void)user;
    ssize_t n = fsdpi_ck_pread(fsdpi_ck_fd(file), data, (size_t)nbytes, at);
    *done = n < 0 ? 0 : (int64_t)n;
    return n < 0 ? errno : 0;
}
static int fsdpi_ck_os_write(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                             int64_t *done) {
    (void)user;
    ssize_t n = fsdpi_ck_pwrite(fsdpi_ck_fd(file), data, (size_t)nbytes, at);
    *done = n < 0 ? 0 : (int64_t)n;
    return n < 0 ? errno : 0;
}
static int fsdpi_ck_os_sync(void *user, void *file) {
    (void)user;
    return fsdpi_ck_fsync(fsdpi_ck_fd(file)) ? errno : 0;
}
static int fsdpi_ck_os_close(void *user, void *file) {
    (void)user;
    return close(fsdpi_ck_fd(file)) ? errno : 0;
}
static int fsdpi_ck_os_make_dir(void *user, const char *path) {
    (void)user;
    return mkdir(path, 0777) ? errno : 0;
}
static int fsdpi_ck_os_sync_dir(void *user, const char *path) {
    (void)user;
    int fd = fsdpi_ck_open_fd(path, O_RDONLY);
    if (fd < 0) return errno;
    int error = fsdpi_ck_fsync(fd) ? errno : 0;
    (void)close(fd);
    return error;
}
// rename(2) replaces an empty directory, so look first: one job at a time makes a step.
static int fsdpi_ck_os_rename(void *user, const char *from, const char *to) {
    struct stat st;
    (void)user;
    if (!stat(to, &st)) return EEXIST;
    return rename(from, to) ? errno : 0;
}
static int fsdpi_ck_os_remove(void *user, const char *path, int is_dir) {
    (void)user;
    return (is_dir ? rmdir(path) : unlink(path)) ? errno : 0;
}
static int fsdpi_ck_os_list(void *user, const char *path, int (*each)(void *arg, const char *name),
                            void *arg) {
    const struct dirent *entry;
    (void)user;
    DIR *dir = opendir(path);
    if (!dir) return errno;
    int stop = 0;
    errno = 0;
    while (!stop && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            stop = each(arg, entry->d_name);
        errno = 0;
    }
    int error = stop ? 0 : errno;
    (void)closedir(dir);
    return error;
}

static const fsdp_file_ops fsdpi_ck_os_files = {
    1,
    sizeof(fsdp_file_ops),
    fsdpi_ck_os_open,
    fsdpi_ck_os_read,
    fsdpi_ck_os_write,
    fsdpi_ck_os_sync,
    fsdpi_ck_os_close,
    fsdpi_ck_os_make_dir,
    fsdpi_ck_os_sync_dir,
    fsdpi_ck_os_rename,
    fsdpi_ck_os_remove,
    fsdpi_ck_os_list,
};

// Where the file calls of an object go, and what the first of them that failed was.
typedef struct fsdpi_ck_disk {
    const fsdp_file_ops *ops;
    void *user;
    uint32_t moves;    // file calls that have ended: a worker that stands still is seen by it
    const char *doing; // the file call under way, and its path: for the text of one that stalls
    const char *path;
    uint32_t left;      // 1: the caller has given the worker up, and ends what it works with
    fsdp_status status; // of the first failure
    int error;          // its errno value; 0: none
    char text[FSDP_CHECKPOINT_PATH + 256];
} fsdpi_ck_disk;

static void fsdpi_ck_disk_init(fsdpi_ck_disk *d, const fsdp_file_ops *ops, void *user) {
    memset(d, 0, sizeof *d);
    d->ops = ops ? ops : &fsdpi_ck_os_files;
    d->user = user;
}
static void fsdpi_ck_forget(fsdpi_ck_disk *d) {
    d->status = FSDP_OK;
    d->error = 0;
    d->text[0] = 0;
}

// The first failure counts. Returns its status.
FSDP_PRINTF(3, 4)
static fsdp_status fsdpi_ck_fault(fsdpi_ck_disk *d, fsdp_status status, const char *format, ...) {
    va_list args;
    if (d->status) return d->status;
    va_start(args, format);
    vsnprintf(d->text, sizeof d->text, format, args);
    va_end(args);
    return d->status = status;
}

// A file call has come back. If the caller has left meanwhile, there is no further one.
static int fsdpi_ck_moved(fsdpi_ck_disk *d) {
    __atomic_add_fetch(&d->moves, 1, __ATOMIC_RELEASE);
    if (!__atomic_load_n(&d->left, __ATOMIC_ACQUIRE)) return 1;
    (void)fsdpi_ck_fault(d, FSDP_ERR_IO, "nobody waits any more");
    return 0;
}
static fsdp_status fsdpi_ck_begin(fsdpi_ck_disk *d, const char *doing, const char *path) {
    if (__atomic_load_n(&d->left, __ATOMIC_ACQUIRE))
        return fsdpi_ck_fault(d, FSDP_ERR_IO, "nobody waits any more");
    __atomic_store_n(&d->path, path, __ATOMIC_RELAXED);
    __atomic_store_n(&d->doing, doing, __ATOMIC_RELAXED);
    return d->status;
}
// A file call has returned `error`: IO with what, where and why.
static fsdp_status fsdpi_ck_end(fsdpi_ck_disk *d, int error, const char *path) {
    if (!fsdpi_ck_moved(d)) return d->status;
    if (!error) return FSDP_OK;
    if (!d->status) d->error = error;
    return fsdpi_ck_fault(d, FSDP_ERR_IO, "%s of %s: %s (%d)", d->doing, path, strerror(error),
                          error);
}

static fsdp_status fsdpi_ck_open(fsdpi_ck_disk *d, const char *path, int create, void **file,
                                 int64_t *nbytes) {
    *file = NULL, *nbytes = 0;
    int error = EINTR;
    if (fsdpi_ck_begin(d, create ? "create" : "open", path)) return d->status;
    while (error == EINTR) error = d->ops->open(d->user, path, create, file, nbytes);
    return fsdpi_ck_end(d, error, path);
}
static fsdp_status fsdpi_ck_sync(fsdpi_ck_disk *d, void *file, const char *path) {
    int error = EINTR;
    if (fsdpi_ck_begin(d, "fsync", path)) return d->status;
    while (error == EINTR) error = d->ops->sync(d->user, file);
    return fsdpi_ck_end(d, error, path);
}
// Also after a failure: a file is always closed.
static fsdp_status fsdpi_ck_close(fsdpi_ck_disk *d, void *file, const char *path) {
    (void)fsdpi_ck_begin(d, "close", path);
    if (!file) return d->status;
    int error = d->ops->close(d->user, file);
    return d->status ? d->status : fsdpi_ck_end(d, error, path);
}
static fsdp_status fsdpi_ck_sync_dir(fsdpi_ck_disk *d, const char *path) {
    int error = EINTR;
    if (fsdpi_ck_begin(d, "fsync of the directory", path)) return d->status;
    while (error == EINTR) error = d->ops->sync_dir(d->user, path);
    return fsdpi_ck_end(d, error, path);
}
static fsdp_status fsdpi_ck_rename(fsdpi_ck_disk *d, const char *from, const char *to) {
    if (fsdpi_ck_begin(d, "rename", to)) return d->status;
    return fsdpi_ck_end(d, d->ops->rename(d->user, from, to), to);
}

// All of nbytes, in pieces: a call that was interrupted or cut short is continued.
static fsdp_status fsdpi_ck_write(fsdpi_ck_disk *d, void *file, const char *path, const void *data,
                                  int64_t nbytes, int64_t at) {
    const char *from = (const char *)data;
    while (nbytes > 0 && !fsdpi_ck_begin(d, "write", path)) {
        int64_t done = 0, piece = fsdpi_ck_less(nbytes, FSDPI_CK_PIECE);
        int error = d->ops->write(d->user, file, from, piece, at, &done);
        if (!fsdpi_ck_moved(d)) return d->status;
        if (error == EINTR) continue;
        if (!error && done <= 0) error = ENOSPC;
        if (error) {
            if (!d->status) d->error = error;
            return fsdpi_ck_fault(d, FSDP_ERR_IO, "write of %lld bytes at %lld of %s: %s (%d)",
                                  (long long)piece, (long long)at, path, strerror(error), error);
        }
        from += done, at += done, nbytes -= done;
    }
    return d->status;
}
static fsdp_status fsdpi_ck_read(fsdpi_ck_disk *d, void *file, const char *path, void *data,
                                 int64_t nbytes, int64_t at) {
    char *to = (char *)data;
    while (nbytes > 0 && !fsdpi_ck_begin(d, "read", path)) {
        int64_t done = 0, piece = fsdpi_ck_less(nbytes, FSDPI_CK_PIECE);
        int error = d->ops->read(d->user, file, to, piece, at, &done);
        if (!fsdpi_ck_moved(d)) return d->status;
        if (error == EINTR) continue;
        if (error) {
            if (!d->status) d->error = error;
            return fsdpi_ck_fault(d, FSDP_ERR_IO, "read of %lld bytes at %lld of %s: %s (%d)",
                                  (long long)piece, (long long)at, path, strerror(error), error);
        }
        if (done <= 0)
            return fsdpi_ck_fault(d, FSDP_ERR_CORRUPT, "%s is cut off at byte %lld", path,
                                  (long long)at);
        to += done, at += done, nbytes -= done;
    }
    return d->status;
}

// DIR/LEAF. 0: it is too long.
static int fsdpi_ck_join(char out[FSDP_CHECKPOINT_PATH], const char *dir, const char *leaf) {
    size_t a = strlen(dir), b = strlen(leaf);
    out[0] = 0;
    if (a + b + 2 > FSDP_CHECKPOINT_PATH) return 0;
    memcpy(out, dir, a);
    out[a] = '/';
    memcpy(out + a + 1, leaf, b + 1);
    return 1;
}


/* ==== checkpoint/worker.h ===================================================================
   one thread that makes file calls, so that the caller's need not wait */

// Owns: the hand-over of jobs. A job is a function with an argument; it knows files and memory that
// the caller has prepared, and neither the world nor the model. One job at a time.

struct fsdpi_ck_timespec {
    long tv_sec, tv_nsec;
};
extern long fsdpi_ck_syscall(long number, ...) __asm__("syscall");
extern int fsdpi_ck_clock(int clock, struct fsdpi_ck_timespec *out) __asm__("clock_gettime");

static int64_t fsdpi_ck_now(void) { // monotonic, nanoseconds
    struct fsdpi_ck_timespec t;
    (void)fsdpi_ck_clock(1 /* CLOCK_MONOTONIC */, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define FSDPI_CK_GET(p)    __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define FSDPI_CK_PUT(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

// A bell: whoever waits looks at it first, then at what it waits for, and sleeps only if the bell
// has not rung since.
static void fsdpi_ck_ring(uint32_t *bell) {
    __atomic_add_fetch(bell, 1, __ATOMIC_RELEASE);
    (void)fsdpi_ck_syscall(SYS_futex, bell, 129 /* wake, private */, 0x7FFFFFFF, NULL, NULL, 0);
}
static void fsdpi_ck_listen(uint32_t *bell, uint32_t seen, int64_t ns) {
    struct fsdpi_ck_timespec t;
    t.tv_sec = (long)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    (void)fsdpi_ck_syscall(SYS_futex, bell, 128 /* wait, private */, seen, &t, NULL, 0);
}

typedef void (*fsdpi_ck_job)(void *arg);

typedef struct fsdpi_ck_watch { // since when the worker has not moved
    uint32_t moves;
    int64_t since;
} fsdpi_ck_watch;

typedef struct fsdpi_ck_worker {
    pthread_t thread;
    int started, pid; // pid: of the process that has the thread
    uint32_t to_worker, to_caller; // bells
    uint32_t busy;                 // 1: a job was given and has not ended
    uint32_t stop;
    fsdpi_ck_job job;
    void *arg;
} fsdpi_ck_worker;

static void *fsdpi_ck_work(void *arg) {
    fsdpi_ck_worker *w = (fsdpi_ck_worker *)arg;
    // A write above the limit of a file's size (ulimit -f) returns EFBIG, and ends no process.
    uint64_t signals = (uint64_t)1 << (SIGXFSZ - 1);
    (void)fsdpi_ck_syscall(SYS_rt_sigprocmask, 0 /* SIG_BLOCK */, &signals, NULL, sizeof signals);
    for (;;) {
        uint32_t seen = FSDPI_CK_GET(&w->to_worker);
        if (FSDPI_CK_GET(&w->busy)) {
            w->job(w->arg);
            FSDPI_CK_PUT(&w->busy, 0);
            fsdpi_ck_ring(&w->to_caller);
        } else if (FSDPI_CK_GET(&w->stop)) {
            return NULL;
        } else {
            fsdpi_ck_listen(&w->to_worker, seen, 1000000000);
        }
    }
}

// 0, or an errno value: there is no thread.
static int fsdpi_ck_start(fsdpi_ck_worker *w) {
    if (w->started) return 0;
    int error = pthread_create(&w->thread, NULL, fsdpi_ck_work, w);
    w->started = !error;
    w->pid = (int)getpid();
    return error;
}
static void fsdpi_ck_give(fsdpi_ck_worker *w, fsdpi_ck_job job, void *arg) {
    w->job = job;
    w->arg = arg;
    FSDPI_CK_PUT(&w->busy, 1);
    fsdpi_ck_ring(&w->to_worker);
}
static int fsdpi_ck_is_busy(fsdpi_ck_worker *w) {
    return FSDPI_CK_GET(&w->busy) && w->pid == (int)getpid();
}

// Waits until the worker has rung or ns have passed; it may return early.
static void fsdpi_ck_nap(fsdpi_ck_worker *w, int64_t ns) {
    uint32_t seen = FSDPI_CK_GET(&w->to_caller);
    if (fsdpi_ck_is_busy(w)) fsdpi_ck_listen(&w->to_caller, seen, ns);
}
static void fsdpi_ck_stop(fsdpi_ck_worker *w) {
    if (!w->started) return;
    FSDPI_CK_PUT(&w->stop, 1);
    fsdpi_ck_ring(&w->to_worker);
    (void)pthread_join(w->thread, NULL);
    w->started = 0;
}


/* ==== checkpoint/objects.h ==================================================================
   what a checkpoint object is made of */

// Memory comes from the model's allocator; where there is no model, from calloc. A room only grows.
typedef struct fsdpi_ck_room {
    void *ptr;
    int64_t cap;
} fsdpi_ck_room;

static fsdp_status fsdpi_ck_alloc(fsdp_model *m, int64_t bytes, void **out) {
    if (m) return fsdp_alloc(m, FSDP_MEMORY_HOST, bytes, "checkpoint: no memory", out);
    *out = calloc(bytes > 0 ? (size_t)bytes : 1, 1);
    return *out ? FSDP_OK
                : fsdp_fail(NULL, FSDP_ERR_OUT_OF_MEMORY,
                            "[E420] checkpoint: no memory for %lld bytes", (long long)bytes);
}
static void fsdpi_ck_free(fsdp_model *m, fsdpi_ck_room *room) {
    if (m) fsdp_free(m, FSDP_MEMORY_HOST, room->ptr, room->cap);
    else free(room->ptr);
    room->ptr = NULL, room->cap = 0;
}
// Room for `bytes`, of which the first `used` stay.
static fsdp_status fsdpi_ck_reserve(fsdp_model *m, fsdpi_ck_room *room, int64_t bytes,
                                    int64_t used) {
    fsdpi_ck_room larger = {NULL, bytes};
    if (bytes <= room->cap) return FSDP_OK;
    if (used && larger.cap < 2 * room->cap) larger.cap = 2 * room->cap;
    fsdp_status status = fsdpi_ck_alloc(m, larger.cap, &larger.ptr);
    if (status) return status;
    if (used) memcpy(larger.ptr, room->ptr, (size_t)used);
    fsdpi_ck_free(m, room);
    *room = larger;
    return FSDP_OK;
}

// One tensor of this rank: its box in the whole tensor, and where the box lies in memory.
typedef struct fsdpi_ck_tensor {
    const char *name; // in files
    int64_t name_at;  // of it in the table's text
    fsdp_dtype dtype; // in memory
    fsdp_dtype
        file_dtype; // in files: a number of an extension, an I64, is an F64 as PyTorch's step
    int32_t ndim;
    int32_t memory;              // FSDP_MEMORY_*, of data
    int32_t ordinal;             // of its parameter; -1: of none
    int32_t place;               // 0: a parameter; 1, 2, ...: the states of that parameter
    int32_t blob;                // index of a blob; -1: it is none
    int32_t holder, num_holders; // of the ranks that hold this very box, which one this is
    int64_t start[FSDP_MAX_DIMS], shape[FSDP_MAX_DIMS], whole[FSDP_MAX_DIMS];
    int64_t numel; // of the box
    void *data;
    fsdp_param_view view; // of a parameter, for `source`
} fsdpi_ck_tensor;

// All tensors of a rank: what a save writes and a load fills.
typedef struct fsdpi_ck_table {
    fsdpi_ck_room tensors, text, order, base; // order: by name; base: of each parameter its tensor
    int32_t num;
    int64_t text_used;
} fsdpi_ck_table;

// A run of bytes that a save writes, in the order of the file.
typedef struct fsdpi_ck_span {
    const char *from;
    int64_t nbytes;
    int32_t memory;
} fsdpi_ck_span;

typedef struct fsdpi_ck_listing {
    int64_t *steps; // [FSDPI_CK_MOST_STEPS], those from the newest one down
    int32_t num;
    int64_t below; // only steps < below
} fsdpi_ck_listing;

// File calls of a find or a load, as jobs of the worker.
typedef struct fsdpi_ck_open_job { // open a file, or find out that there is none
    fsdpi_ck_disk *disk;
    const char *path;
    void *file;
    int64_t nbytes;
    int error, quiet; // quiet: a failure of close does not count
} fsdpi_ck_open_job;

typedef struct fsdpi_ck_read_job {
    fsdpi_ck_disk *disk;
    const char *path;
    void *file, *to;
    int64_t at, nbytes;
} fsdpi_ck_read_job;

typedef struct fsdpi_ck_list_job { // names of data files, one behind another with their ends
    fsdpi_ck_disk *disk;
    const char *path;
    char *to;
    int64_t cap, used, num, has_manifest;
} fsdpi_ck_list_job;

// Who makes the file calls: an object's worker, meeting other ranks; or one process alone. The jobs
// are here, so that a worker that hangs does not write into a stack that has gone.
typedef struct fsdpi_ck_io {
    fsdp_checkpoint *ck; // NULL: alone
    fsdp_model *model;   // whose memory; NULL: calloc
    fsdp_world *world;   // for texts; NULL: none
    char *text;          // alone: where texts of failures go; NULL: nowhere
    size_t cap;
    fsdpi_ck_disk *disk;
    const char *call;
    fsdpi_ck_open_job open;
    fsdpi_ck_read_job read;
    fsdpi_ck_list_job list;
    char path[FSDP_CHECKPOINT_PATH]; // of these jobs
} fsdpi_ck_io;

enum { FSDPI_CK_IDLE = 0, FSDPI_CK_WRITING, FSDPI_CK_COMMITTING }; // what a save is about to do

typedef struct fsdpi_ck_save {
    int stage_of; // FSDPI_CK_*
    int64_t step, begin_ns;
    fsdpi_ck_room entries, names, header, spans, numbers;
    int32_t num_entries, num_spans;
    int64_t header_bytes, data_bytes; // of this rank's file: 8 + N, and behind it
    uint32_t header_crc;
    uint64_t layout;     // hash of all that has been checked: 0: nothing yet
    fsdpi_ck_room sizes; // [3 ranks]: of each rank header bytes, data bytes, header CRC
    fsdpi_ck_room crcs;  // of all blocks of all files; this rank fills in its own
    int64_t num_crcs, first_crc;
    fsdpi_ck_room manifest;     // rank 0's
    fsdpi_ck_room stage;        // a ring of copies; none: the worker writes from the tensors
    int64_t stage_bytes;        // of it that this save uses
    int64_t produced, consumed; // bytes into it and out of it
    uint32_t given_up;          // 1: the producer has failed
    char dir[FSDP_CHECKPOINT_PATH], tmp[FSDP_CHECKPOINT_PATH], final[FSDP_CHECKPOINT_PATH];
    char file[FSDP_CHECKPOINT_PATH], scratch[FSDP_CHECKPOINT_PATH];
    fsdpi_ck_watch watch; // of polls
    int warned;           // the checkpoint is complete, but its directory was not synced, or
                          // an old one was not removed
} fsdpi_ck_save;

struct fsdp_checkpoint {
    fsdp_extension extension; // it ends with the model
    fsdp_model *model;
    fsdp_world *world;
    int32_t rank, size;
    fsdp_checkpoint_desc desc;
    fsdpi_ck_room blobs; // copies of desc.blobs, and their names
    fsdpi_ck_disk disk;
    fsdpi_ck_worker worker;
    int stuck; // the worker did not come back: its memory stays
    fsdpi_ck_table table;
    fsdpi_ck_save save;
    fsdpi_ck_io io;      // of find and load
    fsdpi_ck_room steps; // for keep and find
    fsdpi_ck_listing found;
    fsdp_checkpoint_report report;
};

static const fsdp_checkpoint_blob *fsdpi_ck_blob(const fsdp_checkpoint *ck, int index) {
    return (const fsdp_checkpoint_blob *)ck->blobs.ptr + index;
}
static fsdpi_ck_tensor *fsdpi_ck_tensor_at(const fsdpi_ck_table *t, int index) {
    return (fsdpi_ck_tensor *)t->tensors.ptr + index;
}


/* ==== checkpoint/meet.h =====================================================================
   ranks that wait for files meet every 100 ms, and fail together */

// Owns: rounds. In a phase each rank makes file calls of its own. It meets the others in small
// collectives until none is busy: so no collective waits for a disk longer than a nap.

#define FSDPI_CK_NAP INT64_C(100000000) // nanoseconds between two rounds of a rank that waits

/* One round: is any rank busy, has any failed? */
static fsdp_status fsdpi_ck_round(fsdp_checkpoint *ck, int busy, int failed, int *any_busy,
                                  int *any_failed) {
    int32_t v[2] = {busy, failed};
    fsdp_status status = fsdp_all_reduce(ck->world, NULL, v, 2, FSDP_I32, FSDP_MAX);
    *any_busy = status ? 0 : v[0];
    *any_failed = status ? 1 : v[1];
    return status;
}

// Do two texts tell the same failure, each of its own rank? Both begin with "rank N: [E".
static int fsdpi_ck_is_same_text(const char *a, const char *b) {
    const char *x = strchr(a, '['), *y = strchr(b, '[');
    return x && y && strcmp(x, y) == 0;
}

/* If `mine` is a failure on any rank, all return the failure of the lowest one. Its text is that
   of the rank's last error. What this rank has logged itself is not logged again. */
static fsdp_status fsdpi_ck_agree(fsdp_world *world, const char *call, fsdp_status mine) {
    struct {
        int32_t status;
        char text[1024]; // as a world's last error
    } told;
    const int32_t rank = fsdp_rank(world), size = fsdp_world_size(world);
    int32_t first = mine ? rank : size;
    fsdp_status status = fsdp_all_reduce(world, NULL, &first, 1, FSDP_I32, FSDP_MIN);
    if (status || first >= size) return status;
    memset(&told, 0, sizeof told);
    told.status = (int32_t)mine;
    if (rank == first) snprintf(told.text, sizeof told.text, "%s", fsdp_last_error(world));
    status = fsdp_broadcast(world, NULL, &told, sizeof told, first);
    if (status) return status;
    if (rank == first || (mine && fsdpi_ck_is_same_text(told.text, fsdp_last_error(world))))
        return (fsdp_status)told.status;
    return fsdp_fail(world, (fsdp_status)told.status, "[E421] %s failed on %s", call, told.text);
}

// What the caller of a save or a load has passed. All ranks compare theirs with rank 0's.
typedef struct fsdpi_ck_args {
    uint64_t nonce; // of a save
    int64_t step;
    int32_t params_only, has_source, verify, reserved;
    char path[FSDP_CHECKPOINT_PATH];
} fsdpi_ck_args;

static fsdp_status fsdpi_ck_same_number(fsdp_checkpoint *ck, const char *call, const char *what,
                                        int64_t mine, int64_t first) {
    return mine == first ? FSDP_OK
                         : fsdp_fail(ck->world, FSDP_ERR_MISMATCH,
                                     "[E448] %s: %s is %lld here and %lld on rank 0: pass the same "
                                     "on all ranks",
                                     call, what, (long long)mine, (long long)first);
}
static fsdp_status fsdpi_ck_same_args(fsdp_checkpoint *ck, const char *call,
                                      const fsdpi_ck_args *mine, const fsdpi_ck_args *first) {
    if (strcmp(mine->path, first->path) != 0)
        return fsdp_fail(ck->world, FSDP_ERR_MISMATCH,
                         "[E449] %s: the path is '%.300s' here and '%.300s' on rank 0: pass the "
                         "same on all ranks",
                         call, mine->path, first->path);
    fsdp_status status = fsdpi_ck_same_number(ck, call, "step", mine->step, first->step);
    if (!status)
        status = fsdpi_ck_same_number(ck, call, "desc.params_only", mine->params_only,
                                      first->params_only);
    if (!status)
        status = fsdpi_ck_same_number(ck, call, "desc.source (1: there is one)", mine->has_source,
                                      first->has_source);
    return status ? status
                  : fsdpi_ck_same_number(ck, call, "desc.verify", mine->verify, first->verify);
}

/* The worker's failure becomes this call's. A worker whose file call does not move for stall_ms is
   left behind with all its memory. */
static fsdp_status fsdpi_ck_told(fsdp_checkpoint *ck, const char *call) {
    if (ck->stuck)
        return fsdp_fail(ck->world, FSDP_ERR_IO,
                         "[E422] %s: no progress for %d ms in %s of %s: the file system hangs; "
                         "this object cannot be used any more",
                         call, ck->desc.stall_ms, ck->disk.doing, ck->disk.path);
    return ck->disk.status
               ? fsdp_fail(ck->world, ck->disk.status, "[E423] %s: %s", call, ck->disk.text)
               : FSDP_OK;
}

// Has the worker stood still for too long?
static void fsdpi_ck_look(fsdp_checkpoint *ck, fsdpi_ck_watch *watch) {
    uint32_t moves = FSDPI_CK_GET(&ck->disk.moves);
    int64_t now = fsdpi_ck_now();
    if (!watch->since || moves != watch->moves) {
        watch->moves = moves;
        watch->since = now;
    }
    if (now - watch->since <= (int64_t)ck->desc.stall_ms * 1000000) return;
    ck->stuck = 1;
    FSDPI_CK_PUT(&ck->disk.left, 1);
}

/* Begin a job of the worker. */
static fsdp_status fsdpi_ck_hand(fsdp_checkpoint *ck, const char *call, fsdpi_ck_job job,
                                 void *arg) {
    int error = fsdpi_ck_start(&ck->worker);
    if (error)
        return fsdp_fail(ck->world, FSDP_ERR_OUT_OF_MEMORY,
                         "[E424] %s: cannot start a worker thread: %s (%d)", call, strerror(error),
                         error);
    fsdpi_ck_forget(&ck->disk);
    ck->disk.doing = "the start", ck->disk.path = "the worker thread"; // for a stall before a call
    fsdpi_ck_give(&ck->worker, job, arg);
    return FSDP_OK;
}

/* Wait for the worker, and meet the others meanwhile: they wait for their own, or follow. */
static fsdp_status fsdpi_ck_await(fsdp_checkpoint *ck) {
    fsdpi_ck_watch watch = {0, 0};
    int any_busy, any_failed;
    fsdp_status status = FSDP_OK;
    while (!ck->stuck && fsdpi_ck_is_busy(&ck->worker)) {
        int64_t end = fsdpi_ck_now() + FSDPI_CK_NAP, now;
        while (fsdpi_ck_is_busy(&ck->worker) && (now = fsdpi_ck_now()) < end)
            fsdpi_ck_nap(&ck->worker, end - now);
        if (!fsdpi_ck_is_busy(&ck->worker)) break;
        fsdpi_ck_look(ck, &watch);
        if (!ck->stuck && !status) status = fsdpi_ck_round(ck, 1, 0, &any_busy, &any_failed);
    }
    return status;
}

/* One job of the worker from begin to end: a step of a phase. */
static fsdp_status fsdpi_ck_run(fsdp_checkpoint *ck, const char *call, fsdpi_ck_job job,
                                void *arg) {
    fsdp_status status = fsdpi_ck_hand(ck, call, job, arg);
    if (!status) status = fsdpi_ck_await(ck);
    return status ? status : fsdpi_ck_told(ck, call);
}

/* This rank's part of a phase has ended with `mine`: meet the others until theirs have, too. */
static fsdp_status fsdpi_ck_gather_in(fsdp_checkpoint *ck, fsdp_status mine, int *any_failed) {
    int any_busy = 1;
    fsdp_status status = FSDP_OK;
    while (!status && any_busy) status = fsdpi_ck_round(ck, 0, mine != 0, &any_busy, any_failed);
    return status;
}
/* The same; all return OK, or the failure of the lowest rank that failed. */
static fsdp_status fsdpi_ck_follow(fsdp_checkpoint *ck, const char *call, fsdp_status mine) {
    int any_failed = 0;
    fsdp_status status = fsdpi_ck_gather_in(ck, mine, &any_failed);
    return status ? status : any_failed ? fsdpi_ck_agree(ck->world, call, mine) : FSDP_OK;
}


/* ==== checkpoint/table.h ====================================================================
   the tensors of this rank: names, boxes, memory */

// Owns: what belongs to a checkpoint of this model. The table is made anew at each save and load:
// views and states move when parameters are frozen, thawed or cast.

static fsdp_status fsdpi_ck_bad(const fsdp_checkpoint *ck, const char *call, const char *name,
                                const char *why) {
    return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG, "[E425] %s: '%s': %s", call, name, why);
}

// A new tensor with its name, all else zero. `t` grows; earlier pointers are stale.
static fsdp_status fsdpi_ck_add(fsdp_checkpoint *ck, fsdpi_ck_tensor **out, const char *name) {
    fsdpi_ck_table *t = &ck->table;
    int64_t length = (int64_t)strlen(name) + 1;
    const int64_t size = (int64_t)sizeof(fsdpi_ck_tensor);
    fsdp_status status = fsdpi_ck_reserve(ck->model, &t->tensors, (t->num + 1) * size,
                                          t->num * size);
    if (!status)
        status = fsdpi_ck_reserve(ck->model, &t->text, t->text_used + length, t->text_used);
    if (status) return status;
    fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(t, t->num++);
    memset(x, 0, sizeof *x);
    memcpy((char *)t->text.ptr + t->text_used, name, (size_t)length);
    x->name_at = t->text_used;
    x->ordinal = x->blob = -1;
    x->num_holders = 1;
    t->text_used += length;
    *out = x;
    return FSDP_OK;
}

static int fsdpi_ck_is_reserved(const char *name) {
    return strncmp(name, "optim.state.", 12) == 0 || strncmp(name, "fsdp.", 5) == 0;
}

// UNIT.PARAM, or what `place` makes of it.
static fsdp_status fsdpi_ck_place(fsdp_checkpoint *ck, const char *call, const fsdp_param_view *v,
                                  fsdp_checkpoint_place *p) {
    memset(p, 0, sizeof *p);
    p->num_replicas = 1;
    memcpy(p->shape, v->shape, sizeof p->shape);
    int unit = *v->unit_name && !ck->desc.param_names;
    int n = snprintf(p->name, sizeof p->name, "%s%s%s", unit ? v->unit_name : "", unit ? "." : "",
                     v->name);
    if (n < 0 || n >= FSDP_CHECKPOINT_NAME)
        return fsdpi_ck_bad(ck, call, p->name,
                            "the name is longer than 511 bytes: shorten the "
                            "names of unit and parameter, or give desc.place");
    if (ck->desc.place) ck->desc.place(ck->desc.user, v, p);
    p->name[FSDP_CHECKPOINT_NAME - 1] = 0;
    if (!*p->name && ck->desc.place) return FSDP_OK; // it is to be left out
    if (!*p->name)
        return fsdpi_ck_bad(ck, call, p->name,
                            "a parameter has no name, and nor has its unit: give it one, or give "
                            "desc.place");
    if (fsdpi_ck_is_reserved(p->name))
        return fsdpi_ck_bad(ck, call, p->name,
                            "names that begin with 'optim.state.' or 'fsdp.' "
                            "are the library's: give the parameter another one");
    if (p->num_replicas < 1 || p->replica < 0 || p->replica >= p->num_replicas)
        return fsdpi_ck_bad(ck, call, p->name, "place: expected 0 <= replica < num_replicas");
    for (int d = 0; d < v->ndim; d++)
        if (p->start[d] < 0 || p->shape[d] < 0 || p->start[d] > p->shape[d] - v->shape[d])
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                             "[E426] %s: place of '%s': dim %d begins at %lld and has %lld of %lld "
                             "rows: start + rows must lie in the whole tensor",
                             call, p->name, d, (long long)p->start[d], (long long)v->shape[d],
                             (long long)p->shape[d]);
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_add_param(fsdp_checkpoint *ck, const char *call,
                                      const fsdp_param_view *v) {
    fsdp_checkpoint_place p;
    fsdp_mesh_info info = FSDP_ZERO;
    fsdpi_ck_tensor *x;
    int32_t *base = (int32_t *)ck->table.base.ptr + v->ordinal;
    *base = -1;
    if (ck->desc.skip_frozen && !v->requires_grad) return FSDP_OK;
    fsdp_status status = fsdpi_ck_place(ck, call, v, &p);
    if (status || !*p.name) return status;
    status = fsdp_unit_mesh_info(v->unit, &info);
    *base = ck->table.num;
    if (!status) status = fsdpi_ck_add(ck, &x, p.name);
    if (status) return status;
    x->dtype = x->file_dtype = v->dtype;
    x->ndim = v->ndim;
    x->memory = fsdp_model_run(ck->model) == FSDP_RUN_STREAMS ? FSDP_MEMORY_DEVICE
                                                              : FSDP_MEMORY_HOST;
    x->ordinal = v->ordinal;
    int replicas = info.replicate_mesh_size > 1 ? info.replicate_mesh_size : 1;
    x->holder = p.replica * replicas + (replicas > 1 ? info.replicate_mesh_rank : 0);
    x->num_holders = p.num_replicas * replicas;
    for (int d = 0; d < v->ndim; d++) {
        x->start[d] = p.start[d] + v->start[d];
        x->shape[d] = v->local_shape[d];
        x->whole[d] = p.shape[d];
    }
    x->numel = v->numel;
    x->data = v->shard;
    x->view = *v;
    return FSDP_OK;
}

// A state of an extension: with its parameter's box, or a small thing that all ranks have.
static fsdp_status fsdpi_ck_add_state(fsdp_checkpoint *ck, const char *call,
                                      const fsdp_state_item *item, int32_t *last, int32_t *place) {
    char name[FSDP_CHECKPOINT_NAME + 128];
    fsdpi_ck_tensor *x, p;
    int of = item->ordinal < 0 ? -1 : ((int32_t *)ck->table.base.ptr)[item->ordinal];
    memset(&p, 0, sizeof p);
    if (item->ordinal >= 0 && of < 0) return FSDP_OK; // the parameter is left out
    if (of >= 0) p = *fsdpi_ck_tensor_at(&ck->table, of);
    const char *owner = of >= 0 ? (char *)ck->table.text.ptr + p.name_at : item->extension;
    int n = snprintf(name, sizeof name, "%s%s.%s", of >= 0 ? "optim.state." : "fsdp.", owner,
                     item->name);
    if (n < 0 || n >= (int)sizeof name)
        return fsdpi_ck_bad(ck, call, item->name, "the name of the state is too long");
    fsdp_status status = fsdpi_ck_add(ck, &x, name);
    if (status) return status;
    x->dtype = x->file_dtype = item->dtype;
    if (item->ndim == 0 && item->dtype == FSDP_I64 && !item->sharded) x->file_dtype = FSDP_F64;
    x->memory = item->memory;
    x->ordinal = item->ordinal;
    x->ndim = item->ndim;
    x->data = item->data;
    x->numel = item->numel;
    *place = item->ordinal == *last ? *place + 1 : 1;
    *last = item->ordinal;
    x->place = *place;
    if (item->sharded) {
        x->holder = p.holder, x->num_holders = p.num_holders;
        memcpy(x->start, p.start, sizeof x->start);
        memcpy(x->shape, p.shape, sizeof x->shape);
        memcpy(x->whole, p.whole, sizeof x->whole);
        return FSDP_OK;
    }
    memcpy(x->shape, item->shape, sizeof x->shape);
    memcpy(x->whole, item->shape, sizeof x->whole);
    // All ranks have it. One writes it: rank 0, or of a parameter the one that has its first part.
    int first = of >= 0 ? p.numel > 0 : ck->rank == 0;
    for (int d = 0; of >= 0 && d < p.ndim; d++) first = first && p.start[d] == 0;
    x->holder = first ? p.holder : 1;
    x->num_holders = !first ? 2 : of >= 0 ? p.num_holders : 1;
    if (!first) x->place = -1; // never its turn
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_add_blob(fsdp_checkpoint *ck, int index) {
    const fsdp_checkpoint_blob *b = fsdpi_ck_blob(ck, index);
    char name[128];
    fsdpi_ck_tensor *x;
    if (b->per_rank) snprintf(name, sizeof name, "fsdp.blob.%s.%d", b->name, ck->rank);
    else snprintf(name, sizeof name, "fsdp.blob.%s", b->name);
    fsdp_status status = fsdpi_ck_add(ck, &x, name);
    if (status) return status;
    x->dtype = x->file_dtype = FSDP_U8;
    x->memory = FSDP_MEMORY_HOST;
    x->ndim = 1;
    x->blob = index;
    x->shape[0] = x->whole[0] = x->numel = b->nbytes;
    x->data = b->data;
    if (!b->per_rank && ck->rank != 0) x->place = -1;
    return FSDP_OK;
}

typedef struct fsdpi_ck_named {
    const char *name;
    int32_t index;
} fsdpi_ck_named;
static int fsdpi_ck_by_name(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_named *)a)->name, ((const fsdpi_ck_named *)b)->name);
}
static fsdpi_ck_tensor *fsdpi_ck_find_tensor(const fsdpi_ck_table *t, const char *name) {
    fsdpi_ck_named key = {name, 0};
    const fsdpi_ck_named *found = (const fsdpi_ck_named *)bsearch(
        &key, t->order.ptr, (size_t)t->num, sizeof key, fsdpi_ck_by_name);
    return found ? fsdpi_ck_tensor_at(t, found->index) : NULL;
}

// Names are there for good; a header can have each of them, and no two are equal.
static fsdp_status fsdpi_ck_sort(fsdp_checkpoint *ck, const char *call) {
    fsdpi_ck_table *t = &ck->table;
    fsdp_status status = fsdpi_ck_reserve(ck->model, &t->order,
                                          (t->num + 1) * (int64_t)sizeof(fsdpi_ck_named), 0);
    if (status) return status;
    fsdpi_ck_named *order = (fsdpi_ck_named *)t->order.ptr;
    for (int i = 0; i < t->num; i++) {
        fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(t, i);
        x->name = (const char *)t->text.ptr + x->name_at;
        if (!fsdpi_st_is_text(x->name) || strcmp(x->name, "__metadata__") == 0)
            return fsdpi_ck_bad(ck, call, x->name,
                                "a name in a file is UTF-8, and not '__metadata__': give units, "
                                "parameters or extensions other names, or give desc.place");
        order[i].name = x->name;
        order[i].index = i;
    }
    qsort(order, (size_t)t->num, sizeof *order, fsdpi_ck_by_name);
    for (int i = 1; i < t->num; i++)
        if (strcmp(order[i - 1].name, order[i].name) == 0)
            return fsdpi_ck_bad(ck, call, order[i].name,
                                "two tensors have this name: give units, parameters or extensions "
                                "other names, or give desc.place");
    return FSDP_OK;
}

/* The parameter that a state belongs to; a parameter itself. x has an ordinal. */
static const fsdpi_ck_tensor *fsdpi_ck_param_of(const fsdpi_ck_table *t, const fsdpi_ck_tensor *x) {
    return fsdpi_ck_tensor_at(t, ((const int32_t *)t->base.ptr)[x->ordinal]);
}

/* All tensors of this rank. params_only 1: parameters alone. */
static fsdp_status fsdpi_ck_tabulate(fsdp_checkpoint *ck, const char *call, int params_only) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_state_item item;
    int32_t last = -2, place = 0;
    ck->table.num = 0;
    ck->table.text_used = 0;
    fsdp_status status = fsdpi_ck_reserve(
        ck->model, &ck->table.base,
        ((int64_t)fsdp_num_params(ck->model) + 1) * (int64_t)sizeof(int32_t), 0);
    while (!status && fsdp_next_param(ck->model, &v)) status = fsdpi_ck_add_param(ck, call, &v);
    memset(&item, 0, sizeof item);
    if (!status && !params_only) status = fsdp_next_state(ck->model, &item);
    while (!status && !params_only && item.name) {
        status = fsdpi_ck_add_state(ck, call, &item, &last, &place);
        if (!status) status = fsdp_next_state(ck->model, &item);
    }
    for (int i = 0; !status && !params_only && i < ck->desc.num_blobs; i++)
        status = fsdpi_ck_add_blob(ck, i);
    return status ? status : fsdpi_ck_sort(ck, call);
}

/* The rows of a tensor's box that this rank writes: ranks with the same box take turns, or share
   its rows. Returns their number; 0: none. */
static int64_t fsdpi_ck_my_rows(const fsdpi_ck_tensor *x, int64_t *first) {
    fsdp_range mine = FSDP_ZERO;
    int64_t rows = x->ndim ? x->shape[0] : 1;
    int64_t nbytes = x->numel * (int64_t)fsdp_dtype_size(x->file_dtype);
    *first = 0;
    if (x->numel == 0 || x->place < 0) return 0;
    if (x->num_holders == 1) return rows;
    if (x->ndim && rows >= x->num_holders && nbytes >= 65536 * (int64_t)x->num_holders) {
        (void)fsdp_shard_range(rows, x->num_holders, x->holder, &mine);
        *first = mine.start;
        return mine.count;
    }
    int turn = (x->ordinal < 0 ? 0 : x->ordinal) + x->place;
    return turn % x->num_holders == x->holder ? rows : 0;
}


/* ==== checkpoint/tile.h =====================================================================
   do the boxes of all files tile every tensor? */

// Owns: coverage. Used before a save is committed and before a load reads: holes, overlaps, and
// boxes that disagree about their tensor are found here, once.

// A box of a tensor in one of the files.
typedef struct fsdpi_ck_box {
    const fsdp_safetensors_entry *entry;
    int32_t file;
} fsdpi_ck_box;

static int fsdpi_ck_by_box(const void *a, const void *b) {
    const fsdp_safetensors_entry *x = ((const fsdpi_ck_box *)a)->entry;
    const fsdp_safetensors_entry *y = ((const fsdpi_ck_box *)b)->entry;
    int order = strcmp(x->name, y->name);
    int dims = x->ndim < FSDP_MAX_DIMS ? x->ndim : FSDP_MAX_DIMS;
    for (int d = 0; !order && d < dims && x->ndim == y->ndim; d++)
        order = x->start[d] < y->start[d] ? -1 : x->start[d] > y->start[d];
    if (!order)
        order = ((const fsdpi_ck_box *)a)->file < ((const fsdpi_ck_box *)b)->file
                    ? -1
                    : ((const fsdpi_ck_box *)a)->file > ((const fsdpi_ck_box *)b)->file;
    return order;
}

static int64_t fsdpi_ck_volume(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) n *= shape[d];
    return n;
}
static int fsdpi_ck_same_box(const fsdp_safetensors_entry *x, const fsdp_safetensors_entry *y) {
    size_t bytes = (size_t)x->ndim * sizeof(int64_t);
    return !memcmp(x->start, y->start, bytes) && !memcmp(x->shape, y->shape, bytes);
}
static int fsdpi_ck_meet_boxes(const fsdp_safetensors_entry *x, const fsdp_safetensors_entry *y) {
    for (int d = 0; d < x->ndim; d++)
        if (x->start[d] >= y->start[d] + y->shape[d] || y->start[d] >= x->start[d] + x->shape[d])
            return 0;
    return 1;
}

// The first dim in which boxes begin at different places. Sorted as they are, they ascend in it.
static int fsdpi_ck_sweep_dim(const fsdpi_ck_box *boxes, int count) {
    const fsdp_safetensors_entry *first = boxes[0].entry, *last = boxes[count - 1].entry;
    int d = 0;
    while (d + 1 < first->ndim && first->start[d] == last->start[d]) d++;
    return d;
}

/* The whole of a tensor: as it is told, or the end of its last box. */
static void fsdpi_ck_whole(const fsdpi_ck_box *boxes, int count, int64_t *whole) {
    int ndim = boxes[0].entry->ndim;
    for (int d = 0; d < ndim; d++) whole[d] = 0;
    for (int i = 0; i < count; i++)
        for (int d = 0; d < ndim; d++) {
            const fsdp_safetensors_entry *e = boxes[i].entry;
            int64_t end = e->whole[d] > 0 ? e->whole[d] : e->start[d] + e->shape[d];
            if (end > whole[d]) whole[d] = end;
        }
}

typedef struct fsdpi_ck_tiling {
    const char *const *files; // names, for texts
    int allow_twice;          // 1: a box that is there twice counts once (files of others)
    char why[1024];
} fsdpi_ck_tiling;

static fsdp_status fsdpi_ck_overlap(fsdpi_ck_tiling *t, const fsdpi_ck_box *a,
                                    const fsdpi_ck_box *b, int dim) {
    snprintf(t->why, sizeof t->why,
             "tensor '%s': %s and %s both hold row %lld of dim %d: if ranks hold copies, "
             "desc.place must tell replicas apart",
             a->entry->name, t->files[a->file], t->files[b->file],
             (long long)(a->entry->start[dim] > b->entry->start[dim] ? a->entry->start[dim]
                                                                     : b->entry->start[dim]),
             dim);
    return FSDP_ERR_CORRUPT;
}

// The boxes of one tensor, sorted by their starts. Empty ones hold nothing.
static fsdp_status fsdpi_ck_tile_one(fsdpi_ck_tiling *t, const fsdpi_ck_box *boxes, int count) {
    const fsdp_safetensors_entry *first = boxes[0].entry;
    int64_t whole[FSDP_MAX_DIMS], volume = 0;
    if (first->ndim > FSDP_MAX_DIMS) return FSDP_OK; // nobody can ask for it
    for (int i = 1; i < count; i++)
        if (boxes[i].entry->ndim != first->ndim || boxes[i].entry->dtype != first->dtype ||
            memcmp(boxes[i].entry->whole, first->whole, (size_t)first->ndim * sizeof *whole) != 0) {
            snprintf(t->why, sizeof t->why,
                     "tensor '%s' has another dtype, rank or whole shape in %s than in %s",
                     first->name, t->files[boxes[i].file], t->files[boxes[0].file]);
            return FSDP_ERR_CORRUPT;
        }
    fsdpi_ck_whole(boxes, count, whole);
    int dim = fsdpi_ck_sweep_dim(boxes, count);
    for (int i = 0; i < count; i++) {
        const fsdp_safetensors_entry *x = boxes[i].entry;
        int64_t mine = fsdpi_ck_volume(x->ndim, x->shape);
        int twice = 0;
        for (int k = i + 1; k < count && mine && !twice; k++) {
            const fsdp_safetensors_entry *y = boxes[k].entry;
            if (first->ndim && y->start[dim] >= x->start[dim] + x->shape[dim]) break;
            if (!fsdpi_ck_volume(y->ndim, y->shape) || !fsdpi_ck_meet_boxes(x, y)) continue;
            if (!t->allow_twice || !fsdpi_ck_same_box(x, y))
                return fsdpi_ck_overlap(t, &boxes[i], &boxes[k], dim);
            twice = 1;
        }
        volume += twice ? 0 : mine;
    }
    if (volume == fsdpi_ck_volume(first->ndim, whole)) return FSDP_OK;
    snprintf(t->why, sizeof t->why,
             "tensor '%s': its boxes hold %lld of %lld elements, so some rows are in no file",
             first->name, (long long)volume, (long long)fsdpi_ck_volume(first->ndim, whole));
    return FSDP_ERR_CORRUPT;
}

/* All boxes, which this sorts by name and start. CORRUPT: why says what is wrong. */
static fsdp_status fsdpi_ck_tile(fsdpi_ck_tiling *t, fsdpi_ck_box *boxes, int count) {
    fsdp_status status = FSDP_OK;
    qsort(boxes, (size_t)count, sizeof *boxes, fsdpi_ck_by_box);
    for (int i = 0, end; i < count && !status; i = end) {
        for (end = i + 1; end < count; end++)
            if (strcmp(boxes[end].entry->name, boxes[i].entry->name) != 0) break;
        status = fsdpi_ck_tile_one(t, boxes + i, end - i);
    }
    return status;
}


/* ==== checkpoint/manifest.h =================================================================
   the manifest of a checkpoint, printed and read */

// Owns: manifest.json (docs/checkpoints.md). It is the last file that is written: files, sizes and
// checksums. What lies where is in the headers of the data files.

// One data file of a checkpoint, as the manifest tells it.
typedef struct fsdpi_ck_file {
    const char *name;
    int64_t bytes, header; // of the file; N of its header
    uint32_t header_crc;   // of the first 8 + N bytes
    const uint32_t *crcs;  // of each MiB of its data
    int64_t num_crcs;
} fsdpi_ck_file;

static int64_t fsdpi_ck_blocks(int64_t nbytes) {
    return (nbytes + FSDPI_CK_BLOCK - 1) / FSDPI_CK_BLOCK;
}
static void fsdpi_ck_shard_name(char out[FSDPI_CK_LEAF], int rank) {
    snprintf(out, FSDPI_CK_LEAF, "shard-%05d-model-00001-of-00001.safetensors", rank + 1);
}
static void fsdpi_ck_step_name(char out[FSDPI_CK_LEAF], int64_t step) {
    snprintf(out, FSDPI_CK_LEAF, "step-%08lld", (long long)step);
}

/* The begin of a data file: N in 8 bytes, and the header of `num` entries. sharded: those of the
   file of rank `writer` of `writers`, else whole tensors as transformers has them. Returns its
   bytes, up to `room` of them in `to`; negative: it cannot be printed. */
static int64_t fsdpi_ck_print_begin(fsdp_safetensors_entry *entries, int64_t num, int sharded,
                                    int writer, int writers, char *to, int64_t room) {
    static const char *const keys[3] = {"DCP_VERSION", "format", "fsdp.writer"};
    char who[32];
    const char *values[3] = {"1.0", "pt", who};
    const int first = !sharded, pairs = sharded ? 3 : 1; // else the format alone
    snprintf(who, sizeof who, "%d/%d", writer + 1, writers);
    int64_t n = fsdp_safetensors_print(entries, num, sharded, keys + first, values + first, pairs,
                                       room > 8 ? to + 8 : NULL, room > 8 ? room - 8 : 0);
    for (int i = 0; i < 8 && i < room; i++) to[i] = (char)((uint64_t)n >> (8 * i) & 255);
    return n < 0 ? n : 8 + n;
}

// What the text of a manifest takes at most.
static int64_t fsdpi_ck_manifest_room(int64_t num_files, int64_t num_crcs) {
    return 256 + num_files * 256 + num_crcs * 8;
}

typedef struct fsdpi_ck_print {
    char *buf;
    int64_t used;
} fsdpi_ck_print;
FSDP_PRINTF(2, 3) static void fsdpi_ck_say(fsdpi_ck_print *p, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(p->buf + p->used, 256, format, args);
    va_end(args);
    p->used += n > 0 ? n : 0;
}

/* The manifest of `size` files. world: ranks whose blobs are in them. sizes: of each file bytes of
   its header with the first 8, of its data, CRC of the header; without data there is no file.
   Returns the bytes of the text. */
static int64_t fsdpi_ck_print_manifest(char *buf, int64_t step, int64_t world, int size,
                                       const int64_t *sizes, const uint32_t *crcs) {
    fsdpi_ck_print p = {buf, 0};
    const char *between = "";
    char name[FSDPI_CK_LEAF];
    fsdpi_ck_say(&p,
                 "{\"fsdp_checkpoint\":1,\n\"step\":%lld,\n\"world\":%lld,\n\"block\":%d,\n"
                 "\"files\":[",
                 (long long)step, (long long)world, FSDPI_CK_BLOCK);
    for (int r = 0; r < size; r++) {
        const int64_t *s = sizes + 3 * (int64_t)r;
        if (!s[0]) continue;
        fsdpi_ck_shard_name(name, r);
        fsdpi_ck_say(&p,
                     "%s\n{\"name\":\"%s\",\"bytes\":%lld,\"header\":%lld,\"header_crc\":"
                     "\"%08x\",\"crc\":\"",
                     between, name, (long long)(s[0] + s[1]), (long long)(s[0] - 8),
                     (unsigned)s[2]);
        for (int64_t b = fsdpi_ck_blocks(s[1]); b > 0; b--) fsdpi_ck_say(&p, "%08x", *crcs++);
        fsdpi_ck_say(&p, "\"}");
        between = ",";
    }
    fsdpi_ck_say(&p, "\n]");
    fsdpi_ck_say(&p, ",\n\"crc32c\":\"%08x\"}\n", fsdp_crc32c(0, buf, p.used));
    return p.used;
}

/* -------------------------------------------------------------------------------------------- */
// Reading: what stands in the file is of strangers. It is read twice: to measure, with room.

// A name of a data file: no path, no dot at its begin, of safetensors.
static int fsdpi_ck_is_leaf(const char *name) {
    size_t n = strlen(name), end = strlen(".safetensors");
    if (n <= end || n > 255 || *name == '.' || strcmp(name + n - end, ".safetensors") != 0)
        return 0;
    for (const char *c = name; *c; c++)
        if (!((*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') ||
              *c == '.' || *c == '_' || *c == '-'))
            return 0;
    return 1;
}

typedef struct fsdpi_ck_manifest {
    int64_t step, world;
    int64_t num_files, num_crcs, text_bytes;
    fsdpi_ck_file *files; // rooms, or all NULL: measure
    uint32_t *crcs;
    char *text;
    fsdpi_st_reader r;
    fsdpi_st_out why;
} fsdpi_ck_manifest;

static int fsdpi_ck_read_leaf(fsdpi_st_reader *r, char out[256]) {
    fsdpi_st_string s;
    if (!fsdpi_st_read_string(r, &s)) return 0;
    out[0] = 0;
    if (s.bytes < 256) fsdpi_st_copy(r, &s, out, 255);
    if (fsdpi_ck_is_leaf(out)) return 1;
    return fsdpi_st_wrong(r, "before byte %p: a name that a data file cannot have: expected "
                             "letters, digits, '.', '_', '-' and .safetensors at the end");
}

// Hexadecimal digits of the string, 8 for each number: the first `room` of them are kept.
static int fsdpi_ck_read_crcs(fsdpi_st_reader *r, uint32_t *crcs, int64_t room, int64_t *count) {
    fsdpi_st_string s;
    if (!fsdpi_st_read_string(r, &s)) return 0;
    *count = (s.end - s.begin) / 8;
    int bad = (s.end - s.begin) % 8 != 0;
    for (int64_t i = 0; i < *count && !bad; i++) {
        int high = fsdpi_st_hex(r->text + s.begin + 8 * i, 4);
        int low = fsdpi_st_hex(r->text + s.begin + 8 * i + 4, 4);
        bad = high < 0 || low < 0;
        if (i < room && !bad) crcs[i] = (uint32_t)high << 16 | (uint32_t)low;
    }
    return bad ? fsdpi_st_wrong(r, "before byte %p: a checksum that is not 8 hexadecimal digits")
               : 1;
}

static int fsdpi_ck_read_file(fsdpi_ck_manifest *m) {
    fsdpi_st_reader *r = &m->r;
    fsdpi_st_string key;
    fsdpi_ck_file f;
    char name[256] = "";
    int64_t members = 0, one = 0;
    int more, seen = 0;
    memset(&f, 0, sizeof f);
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &members, &key)) > 0) {
        int which = fsdpi_st_is(r, &key, "name")         ? 1
                    : fsdpi_st_is(r, &key, "bytes")      ? 2
                    : fsdpi_st_is(r, &key, "header")     ? 4
                    : fsdpi_st_is(r, &key, "header_crc") ? 8
                    : fsdpi_st_is(r, &key, "crc")        ? 16
                                                         : 0;
        int ok = which == 1    ? fsdpi_ck_read_leaf(r, name)
                 : which == 2  ? fsdpi_st_read_integer(r, &f.bytes)
                 : which == 4  ? fsdpi_st_read_integer(r, &f.header)
                 : which == 8  ? fsdpi_ck_read_crcs(r, &f.header_crc, 1, &one) && one == 1
                 : which == 16 ? fsdpi_ck_read_crcs(r, m->crcs ? m->crcs + m->num_crcs : NULL,
                                                    m->crcs ? INT64_MAX : 0, &f.num_crcs)
                               : fsdpi_st_skip(r, 3);
        if (!ok || seen & which) return more < 0 ? 0 : fsdpi_st_expected(r, "each member once");
        seen |= which;
    }
    if (more < 0) return 0;
    if (seen != 31) return fsdpi_st_expected(r, "name, bytes, header, header_crc and crc");
    int64_t data = f.bytes - 8 - f.header;
    if (f.header > FSDPI_CK_MOST_HEADER || data < 0 || f.num_crcs != fsdpi_ck_blocks(data))
        return fsdpi_st_expected(r, "sizes that agree with the number of checksums");
    if (m->files) {
        f.name = m->text + m->text_bytes;
        f.crcs = m->crcs + m->num_crcs;
        memcpy(m->text + m->text_bytes, name, strlen(name) + 1);
        m->files[m->num_files] = f;
    }
    m->num_files++;
    m->num_crcs += f.num_crcs;
    m->text_bytes += (int64_t)strlen(name) + 1;
    return m->num_files <= FSDPI_CK_MOST_FILES || fsdpi_st_expected(r, "at most 1,000,000 files");
}

static int fsdpi_ck_read_files(fsdpi_ck_manifest *m) {
    fsdpi_st_reader *r = &m->r;
    if (!fsdpi_st_took(r, '[')) return fsdpi_st_expected(r, "'['");
    if (fsdpi_st_took(r, ']')) return 1;
    do {
        if (!fsdpi_ck_read_file(m)) return 0;
    } while (fsdpi_st_took(r, ','));
    return fsdpi_st_took(r, ']') || fsdpi_st_expected(r, "',' or ']'");
}

static int fsdpi_ck_read_members(fsdpi_ck_manifest *m, int64_t *version) {
    fsdpi_st_reader *r = &m->r;
    fsdpi_st_string key;
    int64_t members = 0, block = 0;
    int more, seen = 0;
    if (!fsdpi_st_took(r, '{')) return fsdpi_st_expected(r, "'{'");
    while ((more = fsdpi_st_read_member(r, &members, &key)) > 0) {
        int which = fsdpi_st_is(r, &key, "fsdp_checkpoint") ? 1
                    : fsdpi_st_is(r, &key, "step")          ? 2
                    : fsdpi_st_is(r, &key, "world")         ? 4
                    : fsdpi_st_is(r, &key, "block")         ? 8
                    : fsdpi_st_is(r, &key, "files")         ? 16
                                                            : 0;
        if (seen & which) return fsdpi_st_expected(r, "each member once");
        seen |= which;
        int ok = which == 1    ? fsdpi_st_read_integer(r, version)
                 : which == 2  ? fsdpi_st_read_integer(r, &m->step)
                 : which == 4  ? fsdpi_st_read_integer(r, &m->world)
                 : which == 8  ? fsdpi_st_read_integer(r, &block)
                 : which == 16 ? fsdpi_ck_read_files(m)
                               : fsdpi_st_skip(r, 1);
        if (!ok) return 0;
        if (*version > 1) return 0;
    }
    if (more < 0) return 0;
    if (fsdpi_st_peek(r) != -1) return fsdpi_st_expected(r, "the end");
    if (seen != 31 || *version != 1 || block != FSDPI_CK_BLOCK)
        return fsdpi_st_expected(r, "fsdp_checkpoint 1, step, world, block 1048576 and files");
    return 1;
}

static int fsdpi_ck_by_leaf(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_file *)a)->name, ((const fsdpi_ck_file *)b)->name);
}

/* Read a manifest: with files, crcs and text NULL it measures. Result: OK; CORRUPT or UNSUPPORTED,
   and why. */
static fsdp_status fsdpi_ck_parse_manifest(fsdpi_ck_manifest *m, const char *text, int64_t nbytes,
                                           char *why, size_t cap) {
    static const char tail[] = ",\n\"crc32c\":\"";
    int64_t end = nbytes - 23, version = 0, one = 0;
    uint32_t crc = 0;
    m->num_files = m->num_crcs = m->text_bytes = 0;
    m->why = fsdpi_st_why(why, cap);
    memset(&m->r, 0, sizeof m->r);
    m->r.text = (const unsigned char *)text;
    m->r.size = nbytes;
    m->r.inside = "";
    m->r.why = &m->why;
    fsdpi_st_reader at_tail = m->r;
    at_tail.at = end + 11;
    int ok = end > 0 && memcmp(text + end, tail, sizeof tail - 1) == 0 &&
             fsdpi_ck_read_crcs(&at_tail, &crc, 1, &one) && one == 1;
    if (!ok) (void)fsdpi_st_wrong(&m->r, "the manifest is cut off: its last line has no crc32c");
    if (ok && fsdp_crc32c(0, text, end) != crc)
        ok = fsdpi_st_wrong(&m->r, "the manifest was changed: its checksum differs");
    if (ok) ok = fsdpi_st_utf8(m->r.text, nbytes) == nbytes || fsdpi_st_wrong(&m->r, "not UTF-8");
    if (ok) ok = fsdpi_ck_read_members(m, &version);
    if (version > 1) {
        fsdpi_st_end(&m->why);
        snprintf(why, cap, "manifest version %lld, this library reads 1: use a newer one",
                 (long long)version);
        return FSDP_ERR_UNSUPPORTED;
    }
    if (ok && m->files) {
        qsort(m->files, (size_t)m->num_files, sizeof *m->files, fsdpi_ck_by_leaf);
        for (int64_t i = 1; i < m->num_files && ok; i++)
            if (strcmp(m->files[i - 1].name, m->files[i].name) == 0)
                ok = fsdpi_st_wrong(&m->r, "the manifest lists a file twice");
    }
    fsdpi_st_end(&m->why);
    return ok ? FSDP_OK : FSDP_ERR_CORRUPT;
}

// One line of an index of Hugging Face: which file a tensor is in.
typedef struct fsdpi_ck_where {
    const char *name, *leaf;
} fsdpi_ck_where;

typedef struct fsdpi_ck_index {
    int64_t num, text_bytes;
    fsdpi_ck_where *list; // rooms, or both NULL: measure
    char *text;
} fsdpi_ck_index;

static int fsdpi_ck_read_where(fsdpi_ck_index *x, fsdpi_st_reader *r, const fsdpi_st_string *key) {
    char leaf[256];
    if (!fsdpi_ck_read_leaf(r, leaf)) return 0;
    if (x->list) {
        char *to = x->text + x->text_bytes;
        x->list[x->num].name = to;
        fsdpi_st_copy(r, key, to, key->bytes);
        x->list[x->num].leaf = to + key->bytes + 1;
        memcpy(to + key->bytes + 1, leaf, strlen(leaf) + 1);
    }
    x->text_bytes += key->bytes + 1 + (int64_t)strlen(leaf) + 1;
    x->num++;
    return 1;
}

static fsdp_status fsdpi_ck_parse_index(fsdpi_ck_index *x, const char *text, int64_t nbytes,
                                        char *why, size_t cap) {
    fsdpi_st_out out = fsdpi_st_why(why, cap);
    fsdpi_st_reader r;
    fsdpi_st_string key;
    int64_t members = 0, inner = 0;
    int more = 1, ok = 1, seen = 0;
    memset(&r, 0, sizeof r);
    r.text = (const unsigned char *)text, r.size = nbytes, r.inside = "", r.why = &out;
    x->num = x->text_bytes = 0;
    if (fsdpi_st_utf8(r.text, nbytes) != nbytes) ok = fsdpi_st_wrong(&r, "not UTF-8");
    if (ok && !fsdpi_st_took(&r, '{')) ok = fsdpi_st_expected(&r, "'{'");
    while (ok && (more = fsdpi_st_read_member(&r, &members, &key)) > 0) {
        if (!fsdpi_st_is(&r, &key, "weight_map")) {
            ok = fsdpi_st_skip(&r, 1);
            continue;
        }
        if (seen++) ok = fsdpi_st_expected(&r, "weight_map once");
        if (ok && !fsdpi_st_took(&r, '{')) ok = fsdpi_st_expected(&r, "'{'");
        while (ok && (more = fsdpi_st_read_member(&r, &inner, &key)) > 0)
            ok = fsdpi_ck_read_where(x, &r, &key);
        if (more < 0) ok = 0;
    }
    if (more < 0) ok = 0;
    if (ok && (!seen || fsdpi_st_peek(&r) != -1))
        ok = fsdpi_st_expected(&r, "weight_map, then the end");
    fsdpi_st_end(&out);
    return ok ? FSDP_OK : FSDP_ERR_CORRUPT;
}


/* ==== checkpoint/keep.h =====================================================================
   which directories are checkpoints, and the end of old ones */

// Owns: the names in the directory of a run, and what is removed. Runs in rank 0's worker. An old
// checkpoint is renamed first, so that nobody finds half of one.

enum {
    FSDPI_CK_MOST_STEPS = 4096, // looked at in one pass; a later save sees the rest
    FSDPI_CK_MOST_DEPTH = 16    // of directories in a checkpoint, which are somebody else's
};

// step-NNNNNNNN: its number, of those that a manifest can have; -1: another name.
static int64_t fsdpi_ck_step_of(const char *name) {
    char again[FSDPI_CK_LEAF];
    int64_t step = 0;
    if (strncmp(name, "step-", 5) != 0) return -1;
    for (const char *c = name + 5; *c; c++) {
        if (*c < '0' || *c > '9' || step > (FSDPI_ST_MOST - (*c - '0')) / 10) return -1;
        step = 10 * step + (*c - '0');
    }
    fsdpi_ck_step_name(again, step);
    return strcmp(again, name) == 0 ? step : -1;
}

static int fsdpi_ck_by_step(const void *a, const void *b) { // newest first
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}
// Of more steps than there is room for, the newest stay.
static int fsdpi_ck_note_step(void *arg, const char *name) {
    fsdpi_ck_listing *l = (fsdpi_ck_listing *)arg;
    int64_t step = fsdpi_ck_step_of(name);
    if (step < 0 || step >= l->below) return 0;
    if (l->num < FSDPI_CK_MOST_STEPS) {
        l->steps[l->num++] = step;
        return 0;
    }
    int32_t oldest = 0;
    for (int32_t i = 1; i < l->num; i++)
        if (l->steps[i] < l->steps[oldest]) oldest = i;
    if (step > l->steps[oldest]) l->steps[oldest] = step;
    return 0;
}
/* The steps in dir, newest first. */
static fsdp_status fsdpi_ck_list_steps(fsdpi_ck_disk *d, const char *dir, fsdpi_ck_listing *l) {
    l->num = 0;
    if (fsdpi_ck_begin(d, "list", dir)) return d->status;
    int error = d->ops->list(d->user, dir, fsdpi_ck_note_step, l);
    if (l->num) qsort(l->steps, (size_t)l->num, sizeof *l->steps, fsdpi_ck_by_step);
    return fsdpi_ck_end(d, error, dir);
}

typedef struct fsdpi_ck_removal {
    fsdpi_ck_disk *d;
    const char *dir;
    int depth; // of what is in it
    char path[FSDP_CHECKPOINT_PATH];
} fsdpi_ck_removal;

static int fsdpi_ck_remove_tree(fsdpi_ck_disk *d, const char *path, int depth);
static int fsdpi_ck_remove_name(void *arg, const char *name) {
    fsdpi_ck_removal *r = (fsdpi_ck_removal *)arg;
    if (r->depth < FSDPI_CK_MOST_DEPTH && fsdpi_ck_join(r->path, r->dir, name))
        (void)fsdpi_ck_remove_tree(r->d, r->path, r->depth);
    return __atomic_load_n(&r->d->left, __ATOMIC_ACQUIRE) != 0;
}
// A link goes and what it points at stays: only what is a directory itself is listed.
static int fsdpi_ck_remove_tree(fsdpi_ck_disk *d, const char *path, int depth) {
    fsdpi_ck_removal r;
    int error = d->ops->remove(d->user, path, 0);
    if (!fsdpi_ck_moved(d)) return EIO;
    if (error != EISDIR) return error;
    r.d = d;
    r.dir = path;
    r.depth = depth + 1;
    error = d->ops->list(d->user, path, fsdpi_ck_remove_name, &r);
    if (!fsdpi_ck_moved(d)) return EIO;
    return error ? error : d->ops->remove(d->user, path, 1);
}
/* Remove a directory and all that is in it as far as that goes. Returns an errno value. */
static int fsdpi_ck_remove_dir(fsdpi_ck_disk *d, const char *dir) {
    int error = 0;
    for (int tries = 0; tries < 3; tries++) { // names may be passed over while others go
        error = fsdpi_ck_remove_tree(d, dir, 0);
        if (!error || error == ENOENT) return 0;
        if (__atomic_load_n(&d->left, __ATOMIC_ACQUIRE)) break;
    }
    return error;
}

typedef struct fsdpi_ck_leftovers {
    fsdpi_ck_disk *d;
    const char *dir;
    char path[FSDP_CHECKPOINT_PATH];
    int error;
} fsdpi_ck_leftovers;

// What a killed job or a failed removal has left. The caller owns the directory (desc.keep).
static int fsdpi_ck_remove_leftover(void *arg, const char *name) {
    fsdpi_ck_leftovers *l = (fsdpi_ck_leftovers *)arg;
    if (strncmp(name, ".tmp-step-", 10) != 0 && strncmp(name, ".tmp-delete-", 12) != 0) return 0;
    int error = fsdpi_ck_join(l->path, l->dir, name) ? fsdpi_ck_remove_dir(l->d, l->path) : 0;
    if (error) l->error = error;
    return 0;
}

/* Remove what desc.keep does not keep, behind the commit of `step`. Returns an errno value: then
   something old is left. */
static int fsdpi_ck_keep(fsdpi_ck_disk *d, const fsdp_checkpoint_desc *desc, const char *dir,
                         int64_t step, int64_t *steps) {
    fsdpi_ck_listing l = {steps, 0, step};
    fsdpi_ck_leftovers left;
    char from[FSDP_CHECKPOINT_PATH], to[FSDP_CHECKPOINT_PATH], name[FSDPI_CK_LEAF];
    int error = 0, others = 0;
    if (desc->keep <= 0) return 0;
    if (fsdpi_ck_list_steps(d, dir, &l)) return d->error;
    if (fsdpi_ck_begin(d, "removal of old checkpoints", dir)) return EIO;
    for (int32_t i = 0; i < l.num; i++) {
        if (desc->keep_every > 0 && l.steps[i] % desc->keep_every == 0) continue;
        if (others++ < desc->keep - 1) continue;
        fsdpi_ck_step_name(name, l.steps[i]);
        int fits = fsdpi_ck_join(from, dir, name);
        snprintf(name, sizeof name, ".tmp-delete-%lld", (long long)l.steps[i]);
        fits = fits && fsdpi_ck_join(to, dir, name);
        int failed = fits ? d->ops->rename(d->user, from, to) : ENAMETOOLONG;
        if (failed) error = failed;
        if (!fsdpi_ck_moved(d)) return EIO;
    }
    left.d = d;
    left.dir = dir;
    left.error = 0;
    int failed = d->ops->list(d->user, dir, fsdpi_ck_remove_leftover, &left);
    return failed ? failed : left.error ? left.error : error;
}


/* ==== checkpoint/save.h =====================================================================
   a save: what this rank writes, and the way to one rename */

// Owns: the protocol. All ranks write and sync their files in a directory whose name begins with a
// dot; then rank 0 writes the manifest, syncs, and renames the directory: the commit. Whatever ends
// a job before the rename leaves the checkpoints that were there.

/* -------------------------------------------------------------------------------------------- */
// What this rank writes: a header, and spans in the order of the header.

static fsdp_safetensors_entry *fsdpi_ck_entries(const fsdpi_ck_save *s) {
    return (fsdp_safetensors_entry *)s->entries.ptr;
}
static fsdpi_ck_span *fsdpi_ck_spans(const fsdpi_ck_save *s) {
    return (fsdpi_ck_span *)s->spans.ptr;
}

// The entries of this rank's file, not sorted yet.
static void fsdpi_ck_list_entries(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    s->num_entries = 0;
    for (int i = 0; i < ck->table.num; i++) {
        const fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(&ck->table, i);
        int64_t first, rows = fsdpi_ck_my_rows(x, &first);
        if (!rows) continue;
        fsdp_safetensors_entry *e = fsdpi_ck_entries(s) + s->num_entries++;
        memset(e, 0, sizeof *e);
        e->name = x->name;
        e->dtype = x->file_dtype;
        e->ndim = x->ndim;
        memcpy(e->start, x->start, sizeof e->start);
        memcpy(e->shape, x->shape, sizeof e->shape);
        memcpy(e->whole, x->whole, sizeof e->whole);
        if (x->ndim) e->start[0] += first, e->shape[0] = rows;
    }
}

// Where the bytes of each entry are. A number that files have as F64 is converted here.
static void fsdpi_ck_list_spans(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    double *numbers = (double *)s->numbers.ptr;
    s->data_bytes = 0;
    for (int i = 0; i < s->num_entries; i++) {
        const fsdp_safetensors_entry *e = fsdpi_ck_entries(s) + i;
        const fsdpi_ck_tensor *x = fsdpi_ck_find_tensor(&ck->table, e->name);
        fsdpi_ck_span *span = fsdpi_ck_spans(s) + i;
        int64_t skipped = x->ndim ? (e->start[0] - x->start[0]) *
                                        fsdpi_ck_volume(x->ndim - 1, x->shape + 1)
                                  : 0;
        span->from = (const char *)x->data + skipped * (int64_t)fsdp_dtype_size(x->dtype);
        span->nbytes = e->end - e->begin;
        span->memory = x->memory;
        if (x->file_dtype != x->dtype) {
            numbers[i] = (double)*(const int64_t *)x->data;
            span->from = (const char *)&numbers[i];
            span->memory = FSDP_MEMORY_HOST;
        }
        s->data_bytes += span->nbytes;
    }
    s->num_spans = s->num_entries;
}

static uint64_t fsdpi_ck_mix(uint64_t h, const void *data, int64_t nbytes) {
    const unsigned char *c = (const unsigned char *)data;
    for (int64_t i = 0; i < nbytes; i++) h = (h ^ c[i]) * 0x100000001B3u;
    return h;
}

/* Table, header and spans of this rank. The header is the same in every save of a layout. */
static fsdp_status fsdpi_ck_prepare(fsdp_checkpoint *ck, const char *call, uint64_t *layout) {
    fsdpi_ck_save *s = &ck->save;
    fsdp_model *m = ck->model;
    fsdp_status status = fsdpi_ck_tabulate(ck, call, 0);
    int64_t num = (int64_t)ck->table.num + 1;
    if (!status)
        status = fsdpi_ck_reserve(m, &s->entries, num * (int64_t)sizeof(fsdp_safetensors_entry), 0);
    if (!status) status = fsdpi_ck_reserve(m, &s->spans, num * (int64_t)sizeof(fsdpi_ck_span), 0);
    if (!status) status = fsdpi_ck_reserve(m, &s->numbers, num * (int64_t)sizeof(double), 0);
    if (status) return status;
    fsdpi_ck_list_entries(ck);
    s->header_bytes = 0;
    if (s->num_entries) {
        fsdp_safetensors_entry *e = fsdpi_ck_entries(s);
        s->header_bytes = fsdpi_ck_print_begin(e, s->num_entries, 1, ck->rank, ck->size, NULL, 0);
        if (s->header_bytes < 0)
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                             "[E427] %s: the header of %d tensors cannot be written: it is larger "
                             "than 100,000,000 bytes",
                             call, s->num_entries);
        status = fsdpi_ck_reserve(m, &s->header, s->header_bytes, 0);
        if (status) return status;
        char *header = (char *)s->header.ptr;
        (void)fsdpi_ck_print_begin(e, s->num_entries, 1, ck->rank, ck->size, header,
                                   s->header_bytes);
        s->header_crc = fsdp_crc32c(0, header, s->header_bytes);
    }
    fsdpi_ck_list_spans(ck);
    *layout = fsdpi_ck_mix(0xCBF29CE484222325u, s->header.ptr, s->header_bytes) | 1;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// A layout that has not been saved yet: sizes of all ranks, and do their boxes tile the tensors?

/* All headers come to rank 0, one after another. */
static fsdp_status fsdpi_ck_gather_headers(fsdp_checkpoint *ck, const char *call,
                                           fsdpi_ck_room *text, int64_t *at) {
    const int64_t *sizes = (const int64_t *)ck->save.sizes.ptr;
    fsdpi_ck_room mine = {NULL, 0};
    int64_t total = 0, most = 0;
    for (int r = 0; r < ck->size; r++) {
        total += sizes[3 * r];
        if (r && sizes[3 * r] > most) most = sizes[3 * r];
    }
    fsdp_status status = ck->rank == 0 ? fsdpi_ck_reserve(ck->model, text, total + 1, 0)
                                       : fsdpi_ck_reserve(ck->model, &mine, most + 1, 0);
    status = fsdpi_ck_agree(ck->world, call, status);
    int64_t begin = 0;
    for (int r = 0; r < ck->size && !status; begin += sizes[3 * r++]) {
        char *to = ck->rank == 0 ? (char *)text->ptr + begin : (char *)mine.ptr;
        at[r] = begin;
        if (ck->rank == r && sizes[3 * r]) memcpy(to, ck->save.header.ptr, (size_t)sizes[3 * r]);
        if (r && sizes[3 * r]) status = fsdp_broadcast(ck->world, NULL, to, sizes[3 * r], r);
    }
    fsdpi_ck_free(ck->model, &mine);
    return status;
}

// Rank 0: parse the headers of all ranks and look whether their boxes tile every tensor.
static fsdp_status fsdpi_ck_check_headers(fsdp_checkpoint *ck, const char *call, const char *text,
                                          const int64_t *at, fsdpi_ck_room *work) {
    const int64_t *sizes = (const int64_t *)ck->save.sizes.ptr;
    int64_t num = 0, chars = 0, files = ck->size;
    fsdp_safetensors_info info;
    char why[256] = "";
    fsdp_status status = FSDP_OK;
    for (int pass = 0; pass < 2 && !status; pass++) {
        int64_t boxes_at = num * (int64_t)sizeof(fsdp_safetensors_entry);
        int64_t names_at = boxes_at + num * (int64_t)sizeof(fsdpi_ck_box);
        int64_t leaves_at = names_at + files * (int64_t)sizeof(char *);
        int64_t chars_at = leaves_at + files * FSDPI_CK_LEAF;
        if (pass) status = fsdpi_ck_reserve(ck->model, work, chars_at + chars, 0);
        if (status) return status;
        char *room = (char *)work->ptr;
        fsdp_safetensors_entry *entry = (fsdp_safetensors_entry *)(void *)room;
        fsdpi_ck_box *box = pass ? (fsdpi_ck_box *)(void *)(room + boxes_at) : NULL;
        const char **names = pass ? (const char **)(void *)(room + names_at) : NULL;
        char *to = pass ? room + chars_at : NULL;
        for (int r = 0; r < ck->size && !status; r++) {
            if (pass) names[r] = room + leaves_at + r * FSDPI_CK_LEAF;
            if (pass) snprintf(room + leaves_at + r * FSDPI_CK_LEAF, FSDPI_CK_LEAF, "rank %d", r);
            if (!sizes[3 * r]) continue;
            status = fsdp_safetensors_parse(text + at[r] + 8, sizes[3 * r] - 8, sizes[3 * r + 1],
                                            pass ? entry : NULL, to, &info, why, sizeof why);
            if (!pass) num += info.num_entries, chars += info.text_bytes;
            for (int64_t i = 0; pass && !status && i < info.num_entries; i++, box++, entry++)
                box->entry = entry, box->file = r;
            if (pass) to += info.text_bytes;
        }
        if (status)
            return fsdp_fail(ck->world, status, "[E428] %s: the header of a rank: %s", call, why);
        if (!pass) continue;
        fsdpi_ck_tiling tiling = {names, 0, ""};
        if (fsdpi_ck_tile(&tiling, (fsdpi_ck_box *)(void *)(room + boxes_at), (int)num))
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG, "[E429] %s: %s", call, tiling.why);
    }
    return FSDP_OK;
}

// Sizes of all ranks' files, room for all checksums, on rank 0 for the manifest.
static fsdp_status fsdpi_ck_share_sizes(fsdp_checkpoint *ck, const char *call) {
    fsdpi_ck_save *s = &ck->save;
    int64_t num = 3 * (int64_t)ck->size;
    fsdp_status status = fsdpi_ck_agree(
        ck->world, call, fsdpi_ck_reserve(ck->model, &s->sizes, num * (int64_t)sizeof(int64_t), 0));
    if (status) return status;
    int64_t *sizes = (int64_t *)s->sizes.ptr;
    memset(sizes, 0, (size_t)num * sizeof *sizes);
    sizes[3 * ck->rank] = s->header_bytes;
    sizes[3 * ck->rank + 1] = s->data_bytes;
    sizes[3 * ck->rank + 2] = s->header_bytes ? (int64_t)s->header_crc : 0;
    status = fsdp_all_reduce(ck->world, NULL, sizes, num, FSDP_I64, FSDP_SUM);
    s->num_crcs = s->first_crc = 0;
    for (int r = 0; r < ck->size && !status; r++) {
        if (r == ck->rank) s->first_crc = s->num_crcs;
        s->num_crcs += fsdpi_ck_blocks(sizes[3 * r + 1]);
    }
    if (status) return status;
    status = fsdpi_ck_reserve(ck->model, &s->crcs, (s->num_crcs + 1) * (int64_t)sizeof(uint32_t),
                              0);
    if (!status && ck->rank == 0)
        status = fsdpi_ck_reserve(ck->model, &s->manifest,
                                  fsdpi_ck_manifest_room(ck->size, s->num_crcs), 0);
    return fsdpi_ck_agree(ck->world, call, status);
}

static fsdp_status fsdpi_ck_new_layout(fsdp_checkpoint *ck, const char *call) {
    fsdpi_ck_room text = {NULL, 0}, work = {NULL, 0}, at = {NULL, 0};
    fsdp_status status = fsdpi_ck_share_sizes(ck, call);
    if (status) return status;
    status = fsdpi_ck_agree(
        ck->world, call, fsdpi_ck_reserve(ck->model, &at, ck->size * (int64_t)sizeof(int64_t), 0));
    if (!status) status = fsdpi_ck_gather_headers(ck, call, &text, (int64_t *)at.ptr);
    if (!status) {
        fsdp_status mine = FSDP_OK;
        if (ck->rank == 0)
            mine = fsdpi_ck_check_headers(ck, call, (const char *)text.ptr, (const int64_t *)at.ptr,
                                          &work);
        status = fsdpi_ck_agree(ck->world, call, mine);
    }
    fsdpi_ck_free(ck->model, &text);
    fsdpi_ck_free(ck->model, &work);
    fsdpi_ck_free(ck->model, &at);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The worker's jobs.

static int fsdpi_ck_stop_at_once(void *arg, const char *name) {
    (void)arg, (void)name;
    return 1;
}
// The directory in which a path's last part is.
static void fsdpi_ck_parent(char out[FSDP_CHECKPOINT_PATH], const char *path) {
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    while (n > 0 && path[n - 1] != '/') n--;
    while (n > 1 && path[n - 1] == '/') n--;
    memcpy(out, n ? path : ".", n ? n : 1);
    out[n ? n : 1] = 0;
}
static void fsdpi_ck_is_there(fsdpi_ck_disk *d, const char *path) {
    (void)fsdpi_ck_fault(d, FSDP_ERR_INVALID_ARG,
                         "%s is there already: choose another step or directory", path);
}
/* Rank 0: the directory of the run, and the temporary one. A step that is there is refused. */
static void fsdpi_ck_make_dirs(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_disk *d = &ck->disk;
    if (fsdpi_ck_begin(d, "mkdir", s->dir)) return;
    int error = d->ops->make_dir(d->user, s->dir);
    if (error != EEXIST && fsdpi_ck_end(d, error, s->dir)) return;
    if (!error && !ck->desc.no_sync) {
        fsdpi_ck_parent(s->scratch, s->dir);
        if (fsdpi_ck_sync_dir(d, s->scratch)) return;
    }
    if (fsdpi_ck_begin(d, "list", s->final)) return;
    error = d->ops->list(d->user, s->final, fsdpi_ck_stop_at_once, NULL);
    if (!error || error == ENOTDIR) {
        fsdpi_ck_is_there(d, s->final);
        return;
    }
    if (error != ENOENT && fsdpi_ck_end(d, error, s->final)) return;
    if (fsdpi_ck_begin(d, "mkdir", s->tmp)) return;
    (void)fsdpi_ck_end(d, d->ops->make_dir(d->user, s->tmp), s->tmp);
}

/* The next bytes to write: from a tensor, or from the ring as soon as they are there. Returns their
   number; 0: the copier has given up. */
static int64_t fsdpi_ck_next_bytes(fsdp_checkpoint *ck, int64_t done, int *span, int64_t *in_span,
                                   const char **from) {
    fsdpi_ck_save *s = &ck->save;
    if (!s->stage_bytes) {
        const fsdpi_ck_span *x = fsdpi_ck_spans(s) + *span;
        int64_t n = x->nbytes - *in_span;
        if (n > FSDPI_CK_PIECE) n = FSDPI_CK_PIECE;
        *from = x->from + *in_span;
        *in_span += n;
        if (*in_span == x->nbytes) (*span)++, *in_span = 0;
        return n;
    }
    for (;;) {
        uint32_t seen = FSDPI_CK_GET(&ck->worker.to_worker);
        int64_t there = FSDPI_CK_GET(&s->produced) - done, at = done % s->stage_bytes;
        if (there > s->stage_bytes - at) there = s->stage_bytes - at;
        if (there > FSDPI_CK_PIECE) there = FSDPI_CK_PIECE;
        *from = (const char *)s->stage.ptr + at;
        if (there > 0) return there;
        if (FSDPI_CK_GET(&s->given_up)) return 0;
        fsdpi_ck_listen(&ck->worker.to_worker, seen, 1000000000);
        __atomic_add_fetch(&ck->disk.moves, 1, __ATOMIC_RELEASE); // it waits for us, not for a disk
    }
}

// Small spans are joined before they are written.
typedef struct fsdpi_ck_joiner {
    int64_t at, used; // of the file; bytes in `room`
    char room[65536];
} fsdpi_ck_joiner;

static void fsdpi_ck_flush(fsdp_checkpoint *ck, fsdpi_ck_joiner *j, void *file) {
    (void)fsdpi_ck_write(&ck->disk, file, ck->save.file, j->room, j->used, j->at);
    j->at += j->used;
    j->used = 0;
}

// Checksums of each block, as its bytes come by.
static void fsdpi_ck_sum(uint32_t *crcs, int64_t at, const char *from, int64_t nbytes) {
    while (nbytes > 0) {
        int64_t n = FSDPI_CK_BLOCK - at % FSDPI_CK_BLOCK;
        if (n > nbytes) n = nbytes;
        uint32_t *crc = crcs + at / FSDPI_CK_BLOCK;
        *crc = fsdp_crc32c(*crc, from, n);
        from += n, at += n, nbytes -= n;
    }
}

static void fsdpi_ck_write_data(fsdp_checkpoint *ck, void *file) {
    fsdpi_ck_save *s = &ck->save;
    uint32_t *crcs = (uint32_t *)s->crcs.ptr + s->first_crc;
    fsdpi_ck_joiner j;
    int span = 0;
    int64_t in_span = 0;
    const char *from = NULL;
    j.at = s->header_bytes, j.used = 0;
    for (int64_t done = 0; done < s->data_bytes && !ck->disk.status;) {
        int64_t n = fsdpi_ck_next_bytes(ck, done, &span, &in_span, &from);
        if (!n) return;
        fsdpi_ck_sum(crcs, done, from, n);
        if (j.used + n > (int64_t)sizeof j.room) fsdpi_ck_flush(ck, &j, file);
        if (n <= (int64_t)sizeof j.room) {
            memcpy(j.room + j.used, from, (size_t)n);
            j.used += n;
        } else {
            (void)fsdpi_ck_write(&ck->disk, file, s->file, from, n, j.at);
            j.at += n;
        }
        done += n;
        FSDPI_CK_PUT(&s->consumed, done);
        if (s->stage_bytes) fsdpi_ck_ring(&ck->worker.to_caller);
    }
    fsdpi_ck_flush(ck, &j, file);
}

/* Every rank: its file, on the disk. On a network file system the directory that rank 0 has made
   may be seen later. */
static void fsdpi_ck_write_file(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_disk *d = &ck->disk;
    int64_t nbytes, give_up = fsdpi_ck_now() + INT64_C(10000000000);
    void *file = NULL;
    if (!s->header_bytes) return;
    while (fsdpi_ck_open(d, s->file, 1, &file, &nbytes) && d->error == ENOENT &&
           fsdpi_ck_now() < give_up) {
        uint32_t nobody = 0;
        fsdpi_ck_forget(d);
        fsdpi_ck_listen(&nobody, 0, 10000000);
    }
    (void)fsdpi_ck_write(d, file, s->file, s->header.ptr, s->header_bytes, 0);
    if (!d->status) fsdpi_ck_write_data(ck, file);
    if (!ck->desc.no_sync) (void)fsdpi_ck_sync(d, file, s->file);
    (void)fsdpi_ck_close(d, file, s->file);
}

/* Rank 0: the manifest, and the rename that makes a checkpoint of it. What fails behind the rename
   is only a warning. */
static void fsdpi_ck_commit(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_disk *d = &ck->disk;
    int64_t nbytes = fsdpi_ck_print_manifest((char *)s->manifest.ptr, s->step, ck->size, ck->size,
                                             (const int64_t *)s->sizes.ptr,
                                             (const uint32_t *)s->crcs.ptr);
    int64_t ignored;
    void *file = NULL;
    (void)fsdpi_ck_join(s->scratch, s->tmp, "manifest.json");
    (void)fsdpi_ck_open(d, s->scratch, 1, &file, &ignored);
    (void)fsdpi_ck_write(d, file, s->scratch, s->manifest.ptr, nbytes, 0);
    if (!ck->desc.no_sync) (void)fsdpi_ck_sync(d, file, s->scratch);
    (void)fsdpi_ck_close(d, file, s->scratch);
    if (!ck->desc.no_sync) (void)fsdpi_ck_sync_dir(d, s->tmp);
    if (fsdpi_ck_rename(d, s->tmp, s->final)) {
        if (d->error != EEXIST) return;
        fsdpi_ck_forget(d); // another object has saved the step meanwhile
        fsdpi_ck_is_there(d, s->final);
        return;
    }
    if (!ck->desc.no_sync && fsdpi_ck_sync_dir(d, s->dir)) s->warned = 1;
    int error = s->warned ? 0
                          : fsdpi_ck_keep(d, &ck->desc, s->dir, s->step, (int64_t *)ck->steps.ptr);
    if (error) {
        (void)fsdpi_ck_fault(d, FSDP_ERR_IO, "removing old checkpoints in %s: %s (%d)", s->dir,
                             strerror(error), error);
        s->warned = 1;
    }
}

/* Rank 0: nothing is left of a save that failed. */
static void fsdpi_ck_clean(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    (void)fsdpi_ck_begin(&ck->disk, "removal", ck->save.tmp);
    (void)fsdpi_ck_remove_dir(&ck->disk, ck->save.tmp);
}

/* -------------------------------------------------------------------------------------------- */
// The calls.

/* A rank has failed, this one with `mine` or not at all: when no worker writes any more, rank 0
   removes what is there. Returns the failure of the lowest rank that failed. */
static fsdp_status fsdpi_ck_give_up(fsdp_checkpoint *ck, const char *call, fsdp_status mine) {
    int any_failed;
    ck->save.stage_of = FSDPI_CK_IDLE;
    FSDPI_CK_PUT(&ck->save.given_up, 1);
    fsdpi_ck_ring(&ck->worker.to_worker);
    fsdp_status status = fsdpi_ck_await(ck);
    if (!status) status = fsdpi_ck_gather_in(ck, FSDP_OK, &any_failed);
    if (!status && ck->rank == 0 && !ck->stuck && ck->worker.started) {
        fsdpi_ck_forget(&ck->disk);
        fsdpi_ck_give(&ck->worker, fsdpi_ck_clean, ck);
        status = fsdpi_ck_await(ck);
    }
    if (!status) status = fsdpi_ck_gather_in(ck, FSDP_OK, &any_failed);
    return status ? status : fsdpi_ck_agree(ck->world, call, mine);
}

static fsdp_status fsdpi_ck_check_units(fsdp_checkpoint *ck, const char *call) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_memory memory;
    fsdp_status status = fsdp_call_begin(ck->model, FSDP_CALL_FULL, call);
    while (!status && fsdp_next_param(ck->model, &v)) {
        status = fsdp_unit_memory(v.unit, &memory);
        if (!status && (memory.pool_slots[FSDP_POOL_GRAD] || memory.pool_slots[FSDP_POOL_RIN] ||
                        memory.pool_slots[FSDP_POOL_ROUT]))
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_STATE,
                             "[E430] %s: unit '%s' holds gradients that are not reduced: save "
                             "behind a backward with gradient sync",
                             call, v.unit_name);
    }
    return status;
}

static fsdp_status fsdpi_ck_set_paths(fsdp_checkpoint *ck, const char *call, const char *dir,
                                      int64_t step, uint64_t nonce) {
    fsdpi_ck_save *s = &ck->save;
    char leaf[FSDPI_CK_LEAF], tmp[FSDPI_CK_LEAF + 32];
    fsdpi_ck_step_name(leaf, step);
    snprintf(tmp, sizeof tmp, ".tmp-%s-%016llx", leaf, (unsigned long long)nonce);
    int fits = snprintf(s->dir, sizeof s->dir, "%s", dir) < FSDP_CHECKPOINT_PATH - 160;
    fits = fits && fsdpi_ck_join(s->final, dir, leaf) && fsdpi_ck_join(s->tmp, dir, tmp);
    fsdpi_ck_shard_name(leaf, ck->rank);
    fits = fits && fsdpi_ck_join(s->file, s->tmp, leaf);
    if (!fits)
        return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E431] %s: the path of the directory is longer than %d bytes: choose a "
                         "shorter one",
                         call, FSDP_CHECKPOINT_PATH - 160);
    s->step = step;
    return FSDP_OK;
}

// A number that no other job has: of this process and this moment.
static uint64_t fsdpi_ck_nonce(void) {
    struct fsdpi_ck_timespec wall;
    (void)fsdpi_ck_clock(0 /* CLOCK_REALTIME */, &wall);
    uint64_t part[4] = {(uint64_t)wall.tv_sec, (uint64_t)wall.tv_nsec, (uint64_t)fsdpi_ck_now(),
                        (uint64_t)getpid()};
    return fsdpi_ck_mix(0xCBF29CE484222325u, part, (int64_t)sizeof part);
}

// Bytes of copies that a save takes: none if the worker can write from the tensors meanwhile.
static int64_t fsdpi_ck_stage_for(const fsdp_checkpoint *ck, int is_async) {
    int64_t all = ck->save.data_bytes, most = ck->desc.stage_bytes;
    int device = 0;
    for (int i = 0; i < ck->save.num_spans; i++)
        device = device || fsdpi_ck_spans(&ck->save)[i].memory == FSDP_MEMORY_DEVICE;
    if (!is_async && !device) return 0;
    if (!is_async && !most) most = 2 * FSDPI_CK_PIECE;
    return most > 0 && most < all ? most : all;
}

// What a rank finds out alone, before the first file call.
static fsdp_status fsdpi_ck_check_save(fsdp_checkpoint *ck, const char *call,
                                       const fsdpi_ck_args *args, const fsdpi_ck_args *first,
                                       int is_async, uint64_t *layout) {
    fsdpi_ck_save *s = &ck->save;
    if (!*args->path || args->step < 0 || args->step > FSDPI_ST_MOST)
        return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E432] %s: dir is empty or step is %lld: pass a directory and a step of "
                         "0 to 2^62",
                         call, (long long)args->step);
    fsdp_status status = ck->stuck ? fsdpi_ck_told(ck, call)
                                   : fsdpi_ck_same_args(ck, call, args, first);
    if (!status) status = fsdpi_ck_check_units(ck, call);
    if (!status) status = fsdpi_ck_set_paths(ck, call, args->path, args->step, first->nonce);
    if (!status) status = fsdpi_ck_prepare(ck, call, layout);
    if (!status) status = fsdp_wait_stream(ck->model, -1);
    if (status) return status;
    s->stage_bytes = fsdpi_ck_stage_for(ck, is_async);
    s->produced = s->consumed = 0;
    s->given_up = 0;
    s->warned = 0;
    memset(&s->watch, 0, sizeof s->watch);
    return fsdpi_ck_reserve(ck->model, &s->stage, s->stage_bytes, 0);
}

#ifdef __SSE2__
static void fsdpi_ck_stream_line(char *to, const char *from) {
    const __m128i *x = (const __m128i *)(const void *)from;
    __m128i a = _mm_loadu_si128(x), b = _mm_loadu_si128(x + 1), c = _mm_loadu_si128(x + 2),
            d = _mm_loadu_si128(x + 3), *y = (__m128i *)(void *)to;
    _mm_stream_si128(y, a);
    _mm_stream_si128(y + 1, b);
    _mm_stream_si128(y + 2, c);
    _mm_stream_si128(y + 3, d);
}
#endif
// Nobody reads the copy soon: it goes past the caches, which keep what the training has in them.
// Two pages side by side are faster than one behind the other.
static void fsdpi_ck_stream(char *to, const char *from, int64_t nbytes) {
#ifdef __SSE2__
    enum { PAGE = 4096 };
    for (; nbytes > 0 && (uintptr_t)to % 16; nbytes--) *to++ = *from++;
    for (; nbytes >= 2 * PAGE; to += 2 * PAGE, from += 2 * PAGE, nbytes -= 2 * PAGE)
        for (int i = 0; i < PAGE; i += 64) {
            fsdpi_ck_stream_line(to + i, from + i);
            fsdpi_ck_stream_line(to + PAGE + i, from + PAGE + i);
        }
    _mm_sfence(); // before the worker is told of it
#endif
    memcpy(to, from, (size_t)nbytes);
}

// Copies spans into the ring as far as there is room. 1: all is copied.
static int fsdpi_ck_copy_some(fsdp_checkpoint *ck, int *span, int64_t *in_span,
                              fsdp_status *status) {
    fsdpi_ck_save *s = &ck->save;
    while (*span < s->num_spans && !*status) {
        const fsdpi_ck_span *x = fsdpi_ck_spans(s) + *span;
        int64_t produced = s->produced, at = produced % s->stage_bytes;
        int64_t n = s->stage_bytes - (produced - FSDPI_CK_GET(&s->consumed));
        if (n > s->stage_bytes - at) n = s->stage_bytes - at;
        if (n > FSDPI_CK_PIECE) n = FSDPI_CK_PIECE;
        if (n > x->nbytes - *in_span) n = x->nbytes - *in_span;
        if (n <= 0) return 0;
        char *to = (char *)s->stage.ptr + at;
        if (x->memory == FSDP_MEMORY_DEVICE)
            *status = fsdp_transfer(ck->model, to, x->from + *in_span, n);
        else fsdpi_ck_stream(to, x->from + *in_span, n);
        *in_span += n;
        if (*in_span == x->nbytes) (*span)++, *in_span = 0;
        FSDPI_CK_PUT(&s->produced, produced + n);
        fsdpi_ck_ring(&ck->worker.to_worker);
    }
    return *span == s->num_spans;
}

// Wait until the worker has made room in the ring, or has ended.
static void fsdpi_ck_wait_room(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    int64_t end = fsdpi_ck_now() + FSDPI_CK_NAP, now;
    while ((now = fsdpi_ck_now()) < end && fsdpi_ck_is_busy(&ck->worker)) {
        uint32_t seen = FSDPI_CK_GET(&ck->worker.to_caller);
        if (s->produced - FSDPI_CK_GET(&s->consumed) < s->stage_bytes) return;
        fsdpi_ck_listen(&ck->worker.to_caller, seen, end - now);
    }
    fsdpi_ck_look(ck, &s->watch);
}

/* Copy everything while the worker writes. With less room than that, wait for the worker, and meet
   the others meanwhile. */
static fsdp_status fsdpi_ck_copy(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    int span = 0, any_busy, any_failed;
    int64_t in_span = 0;
    fsdp_status status = FSDP_OK;
    while (s->stage_bytes && !fsdpi_ck_copy_some(ck, &span, &in_span, &status) && !status &&
           fsdpi_ck_is_busy(&ck->worker) && !ck->stuck) {
        fsdpi_ck_wait_room(ck);
        if (s->produced - FSDPI_CK_GET(&s->consumed) == s->stage_bytes)
            status = fsdpi_ck_round(ck, 1, 0, &any_busy, &any_failed);
    }
    return status;
}

// The checksums of all ranks come together: each rank has filled in its own.
static fsdp_status fsdpi_ck_share_crcs(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    return s->num_crcs
               ? fsdp_all_reduce(ck->world, NULL, s->crcs.ptr, s->num_crcs, FSDP_I32, FSDP_SUM)
               : FSDP_OK;
}

static void fsdpi_ck_report_save(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    const int64_t *sizes = (const int64_t *)s->sizes.ptr;
    int64_t blocked = ck->report.blocked_ns;
    memset(&ck->report, 0, sizeof ck->report);
    ck->report.step = s->step;
    ck->report.bytes = s->data_bytes;
    for (int r = 0; r < ck->size; r++) ck->report.total_bytes += sizes[3 * r + 1];
    ck->report.blocked_ns = blocked;
    ck->report.total_ns = fsdpi_ck_now() - s->begin_ns;
    ck->report.per_rank_blobs = ck->report.verified = 1;
}

/* The next phase of a save, behind a round in which nobody was busy: every rank has written, then
   rank 0 has committed. */
static fsdp_status fsdpi_ck_next_phase(fsdp_checkpoint *ck, const char *call, int any_failed) {
    fsdpi_ck_save *s = &ck->save;
    if (any_failed)
        return fsdpi_ck_give_up(ck, call, s->warned ? FSDP_OK : fsdpi_ck_told(ck, call));
    if (s->stage_of == FSDPI_CK_WRITING) {
        fsdp_status status = fsdpi_ck_share_crcs(ck);
        if (!status && ck->rank == 0) status = fsdpi_ck_hand(ck, call, fsdpi_ck_commit, ck);
        s->stage_of = FSDPI_CK_COMMITTING;
        memset(&s->watch, 0, sizeof s->watch); // the commit has its own time
        return status;
    }
    if (s->warned)
        (void)fsdp_fail(ck->world, FSDP_OK, "[E433] %s: %s is complete, but: %s", call, s->final,
                        ck->disk.text);
    fsdpi_ck_report_save(ck);
    s->stage_of = FSDPI_CK_IDLE;
    return FSDP_OK;
}

/* One round of a save, behind a nap if the worker is busy. */
static fsdp_status fsdpi_ck_advance(fsdp_checkpoint *ck, const char *call, int64_t nap) {
    int64_t end = fsdpi_ck_now() + nap, now;
    int any_busy, any_failed;
    while (fsdpi_ck_is_busy(&ck->worker) && (now = fsdpi_ck_now()) < end)
        fsdpi_ck_nap(&ck->worker, end - now);
    int busy = fsdpi_ck_is_busy(&ck->worker);
    if (busy) fsdpi_ck_look(ck, &ck->save.watch);
    busy = busy && !ck->stuck;
    int failed = ck->stuck || (!busy && ck->disk.status && !ck->save.warned);
    fsdp_status status = fsdpi_ck_round(ck, busy, failed, &any_busy, &any_failed);
    return status || any_busy ? status : fsdpi_ck_next_phase(ck, call, any_failed);
}


/* ==== checkpoint/open.h =====================================================================
   what is at a path: files, tensors, boxes */

// Owns: the way from a path to a sorted list of boxes. One process reads headers into one block of
// bytes; all ranks get that block and understand it alike. A checkpoint of ours, of PyTorch, and a
// model of Hugging Face differ in nothing but who tells the names of the files.

/* -------------------------------------------------------------------------------------------- */
// File calls as jobs.

static void fsdpi_ck_try_open(void *arg) {
    fsdpi_ck_open_job *j = (fsdpi_ck_open_job *)arg;
    if (fsdpi_ck_open(j->disk, j->path, 0, &j->file, &j->nbytes)) {
        j->error = j->disk->error;
        if (j->error == ENOENT || j->error == EISDIR || j->error == EINVAL || j->error == ENOTDIR ||
            j->error == ELOOP)
            fsdpi_ck_forget(j->disk);
    }
}
static void fsdpi_ck_read_bytes(void *arg) {
    fsdpi_ck_read_job *j = (fsdpi_ck_read_job *)arg;
    (void)fsdpi_ck_read(j->disk, j->file, j->path, j->to, j->nbytes, j->at);
}
static void fsdpi_ck_close_file(void *arg) {
    fsdpi_ck_open_job *j = (fsdpi_ck_open_job *)arg;
    (void)fsdpi_ck_close(j->disk, j->file, j->path);
    if (j->quiet) fsdpi_ck_forget(j->disk);
}

static int fsdpi_ck_note_leaf(void *arg, const char *name) {
    fsdpi_ck_list_job *j = (fsdpi_ck_list_job *)arg;
    int64_t n = (int64_t)strlen(name) + 1;
    if (strcmp(name, "manifest.json") == 0) j->has_manifest = 1;
    if (!fsdpi_ck_is_leaf(name)) return 0;
    if (j->used + n <= j->cap) memcpy(j->to + j->used, name, (size_t)n);
    j->used += n;
    j->num++;
    return 0;
}
static void fsdpi_ck_list_leaves(void *arg) {
    fsdpi_ck_list_job *j = (fsdpi_ck_list_job *)arg;
    j->used = j->num = j->has_manifest = 0;
    if (fsdpi_ck_begin(j->disk, "list", j->path)) return;
    (void)fsdpi_ck_end(j->disk, j->disk->ops->list(j->disk->user, j->path, fsdpi_ck_note_leaf, j),
                       j->path);
}

// A failure: of the world; alone it goes to the caller's text and not to a log.
FSDP_PRINTF(3, 4)
static fsdp_status fsdpi_ck_fail(fsdpi_ck_io *io, fsdp_status status, const char *format, ...) {
    char text[FSDP_CHECKPOINT_PATH + 512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (io->ck) return fsdp_fail(io->world, status, "%s", text);
    if (io->cap) snprintf(io->text, io->cap, "%s", text);
    return status;
}
// The disk's failure becomes that of a call without a worker.
static fsdp_status fsdpi_ck_told_alone(fsdpi_ck_io *io) {
    return io->disk->status
               ? fsdpi_ck_fail(io, io->disk->status, "[E434] %s: %s", io->call, io->disk->text)
               : FSDP_OK;
}
static fsdp_status fsdpi_ck_do(fsdpi_ck_io *io, fsdpi_ck_job job, void *arg) {
    if (io->ck) return fsdpi_ck_run(io->ck, io->call, job, arg);
    fsdpi_ck_forget(io->disk);
    job(arg);
    return fsdpi_ck_told_alone(io);
}
static fsdp_status fsdpi_ck_broken(fsdpi_ck_io *io, fsdp_status status, const char *name,
                                   const char *why) {
    return fsdpi_ck_fail(io, status, "[E435] %s: %s: %s", io->call, name, why);
}

// Memory that a worker that hangs may still use is left to the end of the process.
static void fsdpi_ck_drop(fsdpi_ck_io *io, fsdpi_ck_room *room) {
    if (!io->ck || !io->ck->stuck) fsdpi_ck_free(io->model, room);
}

// The jobs on the file `path`. open: its error may be that there is no such file.
static fsdp_status fsdpi_ck_open_path(fsdpi_ck_io *io, const char *path) {
    memset(&io->open, 0, sizeof io->open);
    if (path != io->path) snprintf(io->path, sizeof io->path, "%s", path);
    io->open.disk = io->read.disk = io->disk;
    io->open.path = io->read.path = io->path;
    return fsdpi_ck_do(io, fsdpi_ck_try_open, &io->open);
}
static fsdp_status fsdpi_ck_read_path(fsdpi_ck_io *io, void *to, int64_t nbytes) {
    io->read.file = io->open.file;
    io->read.to = to, io->read.at = 0, io->read.nbytes = nbytes;
    return fsdpi_ck_do(io, fsdpi_ck_read_bytes, &io->read);
}
// Also after a failure, whose status this returns then.
static fsdp_status fsdpi_ck_close_path(fsdpi_ck_io *io, fsdp_status status) {
    if (io->ck && io->ck->stuck) return status;
    io->open.quiet = status != 0; // the text of the first failure stays
    fsdp_status closed = fsdpi_ck_do(io, fsdpi_ck_close_file, &io->open);
    return status ? status : closed;
}

/* -------------------------------------------------------------------------------------------- */
// The block of bytes. Each piece is a number of bytes (-1: there is no such piece), then the bytes,
// padded to 8. Pieces: 1 if the path is a file and no directory; the manifest; the index; then of
// each data file its name, its size as 8 bytes, and its header with the 8 bytes before it.

typedef struct fsdpi_ck_bulk {
    fsdpi_ck_room room;
    int64_t used;
} fsdpi_ck_bulk;

// A new piece; NULL data: its bytes come later. Returns where they go, or a failure.
static fsdp_status fsdpi_ck_put(fsdpi_ck_io *io, fsdpi_ck_bulk *b, const void *data, int64_t nbytes,
                                char **where) {
    int64_t padded = nbytes < 0 ? 0 : (nbytes + 7) / 8 * 8;
    fsdp_status status = fsdpi_ck_reserve(io->model, &b->room, b->used + 8 + padded, b->used);
    if (status) return status;
    char *to = (char *)b->room.ptr + b->used;
    memcpy(to, &nbytes, 8);
    memset(to + 8, 0, (size_t)padded);
    if (data && nbytes > 0) memcpy(to + 8, data, (size_t)nbytes);
    if (where) *where = to + 8;
    b->used += 8 + padded;
    return FSDP_OK;
}
// The next piece; its number of bytes.
static int64_t fsdpi_ck_take(const fsdpi_ck_bulk *b, int64_t *at, const char **where) {
    int64_t nbytes = 0;
    if (*at + 8 > b->used) return -1;
    memcpy(&nbytes, (const char *)b->room.ptr + *at, 8);
    *where = (const char *)b->room.ptr + *at + 8;
    *at += 8 + (nbytes < 0 ? 0 : (nbytes + 7) / 8 * 8);
    return nbytes;
}

// A whole file as a piece. there: out: 0: there is no such file (a piece that is none). What has
// its name and is no file is a failure: nobody takes a checkpoint for one without a manifest.
static fsdp_status fsdpi_ck_fetch_text(fsdpi_ck_io *io, fsdpi_ck_bulk *b, const char *dir,
                                       const char *leaf, int *there) {
    char path[FSDP_CHECKPOINT_PATH], *to = NULL;
    *there = 0;
    if (!fsdpi_ck_join(path, dir, leaf))
        return fsdpi_ck_broken(io, FSDP_ERR_INVALID_ARG, dir, "the path is too long");
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    if (io->open.error == ENOENT || io->open.error == ENOTDIR)
        return fsdpi_ck_put(io, b, NULL, -1, NULL);
    if (io->open.error)
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                               io->open.error == ELOOP ? strerror(ELOOP) : "it is no regular file");
    *there = 1;
    if (io->open.nbytes > FSDPI_CK_MOST_TEXT)
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, "it has more than 64 MiB");
    if (!status) status = fsdpi_ck_put(io, b, NULL, io->open.nbytes, &to);
    if (!status) status = fsdpi_ck_read_path(io, to, io->open.nbytes);
    return fsdpi_ck_close_path(io, status);
}

// The header of a data file: three pieces.
static fsdp_status fsdpi_ck_fetch_header(fsdpi_ck_io *io, fsdpi_ck_bulk *b, const char *path,
                                         const char *leaf) {
    char why[256] = "", *to = NULL;
    int64_t n = 0;
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    int64_t bytes = io->open.nbytes;
    if (io->open.error)
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, strerror(io->open.error));
    status = fsdpi_ck_put(io, b, leaf, (int64_t)strlen(leaf) + 1, NULL);
    if (!status) status = fsdpi_ck_put(io, b, &bytes, 8, NULL);
    if (!status) status = fsdpi_ck_put(io, b, NULL, 8, &to); // grows to the header
    if (!status && bytes >= 8) status = fsdpi_ck_read_path(io, to, 8);
    if (!status && fsdp_safetensors_header_bytes(to, bytes, &n, why, sizeof why))
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, why);
    if (!status && b->used + n > INT64_C(1) << 30)
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                                 "with its header all headers have more than 1 GiB");
    b->used -= 16;
    if (!status) status = fsdpi_ck_put(io, b, NULL, 8 + n, &to);
    if (!status) status = fsdpi_ck_read_path(io, to, 8 + n);
    return fsdpi_ck_close_path(io, status);
}

// Names of data files, each once and sorted, behind one another in `names`.
typedef struct fsdpi_ck_leaves {
    fsdpi_ck_room text, list;
    int64_t num;
} fsdpi_ck_leaves;
static int fsdpi_ck_by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static fsdp_status fsdpi_ck_leaves_of_dir(fsdpi_ck_io *io, const char *path, fsdpi_ck_leaves *l) {
    fsdpi_ck_list_job *j = &io->list;
    fsdp_status status = FSDP_OK;
    snprintf(io->path, sizeof io->path, "%s", path);
    j->disk = io->disk, j->path = io->path;
    do { // the first pass measures; a directory may grow meanwhile
        j->to = (char *)l->text.ptr, j->cap = l->text.cap;
        status = fsdpi_ck_do(io, fsdpi_ck_list_leaves, j);
        if (!status && j->used > j->cap) status = fsdpi_ck_reserve(io->model, &l->text, j->used, 0);
    } while (!status && j->used > j->cap);
    if (!status)
        status = fsdpi_ck_reserve(io->model, &l->list, (j->num + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    const char **list = (const char **)l->list.ptr, *at = (const char *)l->text.ptr;
    for (l->num = 0; l->num < j->num; at += strlen(at) + 1) list[l->num++] = at;
    qsort((void *)list, (size_t)l->num, sizeof *list, fsdpi_ck_by_text);
    return FSDP_OK;
}

// Reads the manifest or the index that is the piece at `text`; both passes.
static fsdp_status fsdpi_ck_get_manifest(fsdpi_ck_io *io, const char *text, int64_t nbytes,
                                         fsdpi_ck_manifest *m, fsdpi_ck_room *room) {
    char why[256] = "";
    memset(m, 0, sizeof *m);
    fsdp_status status = fsdpi_ck_parse_manifest(m, text, nbytes, why, sizeof why);
    if (!status) {
        int64_t files = m->num_files * (int64_t)sizeof(fsdpi_ck_file), crcs = m->num_crcs * 4;
        status = fsdpi_ck_reserve(io->model, room, files + crcs + m->text_bytes + 1, 0);
        if (status) return status;
        m->files = (fsdpi_ck_file *)room->ptr;
        m->crcs = (uint32_t *)(void *)((char *)room->ptr + files);
        m->text = (char *)room->ptr + files + crcs;
        status = fsdpi_ck_parse_manifest(m, text, nbytes, why, sizeof why);
    }
    return status ? fsdpi_ck_broken(io, status, "manifest.json", why) : FSDP_OK;
}
static fsdp_status fsdpi_ck_get_index(fsdpi_ck_io *io, const char *text, int64_t nbytes,
                                      fsdpi_ck_index *x, fsdpi_ck_room *room) {
    char why[256] = "";
    memset(x, 0, sizeof *x);
    fsdp_status status = fsdpi_ck_parse_index(x, text, nbytes, why, sizeof why);
    if (!status) {
        int64_t list = (x->num + 1) * (int64_t)sizeof(fsdpi_ck_where);
        status = fsdpi_ck_reserve(io->model, room, list + x->text_bytes + 1, 0);
        if (status) return status;
        x->list = (fsdpi_ck_where *)room->ptr;
        x->text = (char *)room->ptr + list;
        status = fsdpi_ck_parse_index(x, text, nbytes, why, sizeof why);
    }
    return status ? fsdpi_ck_broken(io, status, "model.safetensors.index.json", why) : FSDP_OK;
}

// The data files that a manifest or an index names.
static fsdp_status fsdpi_ck_told_leaves(fsdpi_ck_io *io, const char *text, int64_t nbytes,
                                        int is_index, fsdpi_ck_leaves *l) {
    fsdpi_ck_manifest m;
    fsdpi_ck_index x;
    fsdp_status status = is_index ? fsdpi_ck_get_index(io, text, nbytes, &x, &l->text)
                                  : fsdpi_ck_get_manifest(io, text, nbytes, &m, &l->text);
    if (status) return status;
    int64_t num = is_index ? x.num : m.num_files;
    status = fsdpi_ck_reserve(io->model, &l->list, (num + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    const char **list = (const char **)l->list.ptr;
    for (int64_t i = 0; i < num; i++) list[i] = is_index ? x.list[i].leaf : m.files[i].name;
    qsort((void *)list, (size_t)num, sizeof *list, fsdpi_ck_by_text);
    l->num = 0;
    for (int64_t i = 0; i < num; i++)
        if (!i || strcmp(list[l->num - 1], list[i]) != 0) list[l->num++] = list[i];
    return FSDP_OK;
}

// The part of a path behind its last slash.
static const char *fsdpi_ck_last_part(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static fsdp_status fsdpi_ck_fetch_dir(fsdpi_ck_io *io, const char *path, fsdpi_ck_bulk *b,
                                      fsdpi_ck_leaves *l) {
    char file[FSDP_CHECKPOINT_PATH];
    int manifest = 0, index = 0, pickled = 0;
    int64_t manifest_at = b->used;
    fsdp_status status = fsdpi_ck_fetch_text(io, b, path, "manifest.json", &manifest);
    int64_t index_at = b->used;
    if (!status && !manifest)
        status = fsdpi_ck_fetch_text(io, b, path, "model.safetensors.index.json", &index);
    else if (!status) status = fsdpi_ck_put(io, b, NULL, -1, NULL);
    if (!status && (manifest || index)) {
        int64_t at = index ? index_at : manifest_at, nbytes;
        const char *text = NULL;
        nbytes = fsdpi_ck_take(b, &at, &text);
        status = fsdpi_ck_told_leaves(io, text, nbytes, index, l);
    } else if (!status) {
        status = fsdpi_ck_leaves_of_dir(io, path, l);
        if (!status && io->list.has_manifest)
            status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                                     "there is a manifest.json that cannot be opened: does it "
                                     "point at nothing?");
        int64_t used = b->used;
        if (!status && !l->num) {
            status = fsdpi_ck_fetch_text(io, b, path, ".metadata", &pickled);
            b->used = used;
            if (!status)
                status = pickled ? fsdpi_ck_broken(io, FSDP_ERR_UNSUPPORTED, path,
                                                   "a checkpoint of PyTorch in pickled form: save "
                                                   "it with HuggingFaceStorageWriter("
                                                   "save_distributed=True)")
                                 : fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                                                   "it has no manifest.json and no .safetensors "
                                                   "file: is it a checkpoint?");
        }
    }
    for (int64_t i = 0; i < l->num && !status; i++) {
        const char *leaf = ((const char *const *)l->list.ptr)[i];
        if (!fsdpi_ck_join(file, path, leaf))
            return fsdpi_ck_broken(io, FSDP_ERR_INVALID_ARG, path, "the path is too long");
        status = fsdpi_ck_fetch_header(io, b, file, leaf);
    }
    return status;
}

/* Rank 0, or a process alone: all headers of what is at path. */
static fsdp_status fsdpi_ck_fetch(fsdpi_ck_io *io, const char *path, fsdpi_ck_bulk *b) {
    fsdpi_ck_leaves l;
    memset(&l, 0, sizeof l);
    b->used = 0;
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    if (io->open.error == ENOENT || io->open.error == ENOTDIR)
        return fsdpi_ck_broken(io, FSDP_ERR_IO, path, "there is no such file or directory");
    int64_t is_file = !io->open.error;
    if (is_file) status = fsdpi_ck_close_path(io, FSDP_OK);
    if (!status) status = fsdpi_ck_put(io, b, &is_file, 8, NULL);
    if (!status && !is_file) {
        status = fsdpi_ck_fetch_dir(io, path, b, &l);
    } else if (!status) {
        status = fsdpi_ck_put(io, b, NULL, -1, NULL);
        if (!status) status = fsdpi_ck_put(io, b, NULL, -1, NULL);
        if (!status) status = fsdpi_ck_fetch_header(io, b, path, fsdpi_ck_last_part(path));
    }
    fsdpi_ck_drop(io, &l.text);
    fsdpi_ck_drop(io, &l.list);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// What the block says.

typedef struct fsdpi_ck_part { // a data file
    const char *name;
    int64_t bytes, header; // of the file; 8 + N
    int64_t first, num;    // its entries
    const char *text;      // of the header, from the first byte of the file on
    const uint32_t *crcs;  // NULL: nothing tells them
} fsdpi_ck_part;

typedef struct fsdpi_ck_opened {
    fsdpi_ck_bulk bulk;
    fsdpi_ck_room told, work; // of manifest or index; entries, boxes, parts, names
    int64_t step;             // -1: no manifest tells it
    int64_t world;            // ranks that saved it; 0: not told
    int64_t num_parts, num_boxes, total_bytes;
    fsdpi_ck_part *parts;
    fsdp_safetensors_entry *entries;
    fsdpi_ck_box *boxes; // sorted by name and start
    const char *dir;     // the path
    int64_t is_file;     // 1: the path is the only part itself
} fsdpi_ck_opened;

static void fsdpi_ck_opened_end(fsdpi_ck_io *io, fsdpi_ck_opened *o) {
    fsdpi_ck_drop(io, &o->bulk.room);
    fsdpi_ck_drop(io, &o->told);
    fsdpi_ck_drop(io, &o->work);
}

// One data file of the block: its pieces, parsed; measure if there is no room yet.
static fsdp_status fsdpi_ck_parse_part(fsdpi_ck_io *io, fsdpi_ck_opened *o, int64_t *at, int pass,
                                       char **text, int64_t *chars) {
    const char *name = "", *size = NULL, *header = NULL;
    char why[256] = "";
    fsdp_safetensors_info info;
    int64_t bytes = 0;
    (void)fsdpi_ck_take(&o->bulk, at, &name);
    (void)fsdpi_ck_take(&o->bulk, at, &size);
    memcpy(&bytes, size, 8);
    int64_t n = fsdpi_ck_take(&o->bulk, at, &header);
    fsdp_status status = fsdp_safetensors_parse(header + 8, n - 8, bytes - n,
                                                pass ? o->entries + o->num_boxes : NULL, *text,
                                                &info, why, sizeof why);
    if (status) return fsdpi_ck_broken(io, status, name, why);
    if (pass) {
        fsdpi_ck_part *p = &o->parts[o->num_parts];
        memset(p, 0, sizeof *p);
        p->name = name, p->bytes = bytes, p->header = n, p->text = header;
        p->first = o->num_boxes, p->num = info.num_entries;
        *text += info.text_bytes;
        for (int64_t i = 0; i < p->num; i++) {
            o->boxes[o->num_boxes + i].entry = o->entries + o->num_boxes + i;
            o->boxes[o->num_boxes + i].file = (int32_t)o->num_parts;
        }
    }
    o->total_bytes += bytes - n;
    o->num_parts++;
    o->num_boxes += info.num_entries;
    *chars += info.text_bytes;
    return FSDP_OK;
}

// A manifest: the files have the sizes, headers and ranks that it tells.
static fsdp_status fsdpi_ck_match_manifest(fsdpi_ck_io *io, fsdpi_ck_opened *o, const char *text,
                                           int64_t nbytes) {
    fsdpi_ck_manifest m;
    fsdp_status status = fsdpi_ck_get_manifest(io, text, nbytes, &m, &o->told);
    if (status) return status;
    o->step = m.step;
    o->world = m.world;
    for (int64_t i = 0; i < m.num_files; i++) { // the same order: by name
        fsdpi_ck_part *p = &o->parts[i];
        const fsdpi_ck_file *f = &m.files[i];
        if (p->bytes != f->bytes || p->header != f->header + 8)
            return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, p->name,
                                   p->bytes < f->bytes ? "the file is cut off: the manifest tells "
                                                         "a larger one"
                                                       : "its size is not that of the manifest");
        if (fsdp_crc32c(0, p->text, p->header) != f->header_crc)
            return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, p->name,
                                   "its header is not the one that the manifest was written for");
        p->crcs = f->crcs;
    }
    return FSDP_OK;
}

static int fsdpi_ck_by_where(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_where *)a)->name, ((const fsdpi_ck_where *)b)->name);
}
// An index: every name is in the file that it names, and every tensor of the files is named.
static fsdp_status fsdpi_ck_match_index(fsdpi_ck_io *io, fsdpi_ck_opened *o, const char *text,
                                        int64_t nbytes) {
    fsdpi_ck_index x;
    char why[320];
    fsdp_status status = fsdpi_ck_get_index(io, text, nbytes, &x, &o->told);
    if (status) return status;
    qsort(x.list, (size_t)x.num, sizeof *x.list, fsdpi_ck_by_where);
    for (int64_t i = 0, k = 0; i < x.num || k < o->num_boxes; i++, k++) { // both by name
        const char *told = i < x.num ? x.list[i].name : NULL;
        const char *there = k < o->num_boxes ? o->boxes[k].entry->name : NULL;
        int order = !told ? 1 : !there ? -1 : strcmp(told, there);
        if (!order && strcmp(x.list[i].leaf, o->parts[o->boxes[k].file].name) == 0) continue;
        snprintf(why, sizeof why,
                 order > 0   ? "tensor '%.200s' is in a file, and the index does not name it"
                 : order < 0 ? "it names tensor '%.200s', which is in no file"
                             : "tensor '%.200s' is in another file than the index says",
                 order > 0 ? there : told);
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, "model.safetensors.index.json", why);
    }
    return FSDP_OK;
}

/* All ranks: files, entries and boxes, checked. */
static fsdp_status fsdpi_ck_understand(fsdpi_ck_io *io, fsdpi_ck_opened *o) {
    const char *manifest = NULL, *index = NULL, *form = NULL;
    int64_t at = 0, chars = 0;
    o->step = -1, o->world = 0;
    (void)fsdpi_ck_take(&o->bulk, &at, &form);
    memcpy(&o->is_file, form, 8);
    int64_t manifest_bytes = fsdpi_ck_take(&o->bulk, &at, &manifest);
    int64_t index_bytes = fsdpi_ck_take(&o->bulk, &at, &index), files_at = at;
    fsdp_status status = FSDP_OK;
    for (int pass = 0; pass < 2 && !status; pass++) {
        int64_t entries = (o->num_boxes + 1) * (int64_t)sizeof *o->entries;
        int64_t boxes = (o->num_boxes + 1) * (int64_t)sizeof *o->boxes;
        int64_t parts = (o->num_parts + 1) * (int64_t)sizeof *o->parts;
        char *text = NULL;
        if (pass)
            status = fsdpi_ck_reserve(io->model, &o->work, entries + boxes + parts + chars + 1, 0);
        if (status) return status;
        if (pass) {
            text = (char *)o->work.ptr;
            o->entries = (fsdp_safetensors_entry *)(void *)text;
            o->boxes = (fsdpi_ck_box *)(void *)(text + entries);
            o->parts = (fsdpi_ck_part *)(void *)(text + entries + boxes);
            text += entries + boxes + parts;
        }
        o->num_boxes = o->num_parts = o->total_bytes = chars = 0;
        for (at = files_at; at < o->bulk.used && !status;)
            status = fsdpi_ck_parse_part(io, o, &at, pass, &text, &chars);
    }
    if (!status && manifest_bytes >= 0)
        status = fsdpi_ck_match_manifest(io, o, manifest, manifest_bytes);
    if (status) return status;
    fsdpi_ck_room names = {NULL, 0};
    status = fsdpi_ck_reserve(io->model, &names, (o->num_parts + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    for (int64_t i = 0; i < o->num_parts; i++) ((const char **)names.ptr)[i] = o->parts[i].name;
    fsdpi_ck_tiling tiling = {(const char *const *)names.ptr, manifest_bytes < 0, ""};
    status = fsdpi_ck_tile(&tiling, o->boxes, (int)o->num_boxes);
    fsdpi_ck_free(io->model, &names);
    if (status) return fsdpi_ck_broken(io, status, o->dir, tiling.why);
    return index_bytes >= 0 ? fsdpi_ck_match_index(io, o, index, index_bytes) : FSDP_OK;
}

/* The boxes of a tensor: the first of them, and how many. 0: there is no such tensor. */
static int64_t fsdpi_ck_boxes_of(const fsdpi_ck_opened *o, const char *name, int64_t *first) {
    int64_t low = 0, high = o->num_boxes;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (strcmp(o->boxes[middle].entry->name, name) < 0) low = middle + 1;
        else high = middle;
    }
    *first = low;
    while (high < o->num_boxes && strcmp(o->boxes[high].entry->name, name) == 0) high++;
    return high - low;
}


/* ==== checkpoint/read.h =====================================================================
   bytes of boxes, in the order of the files, checked */

// Owns: reading. What is wanted is a list of items, each of them what a box of a file and a box in
// memory share. The list is sorted by place in the files, so that every byte is read once, and
// every block of checksums is looked at once.

enum {
    FSDPI_CK_READS = 256,       // of one job of the worker
    FSDPI_CK_RUNS = 4096,       // copies behind it
    FSDPI_CK_SLICE = 512 << 10, // read, then checked while a core's own cache has it
    FSDPI_CK_SHORT = 4096       // a run of less bytes is read together with its neighbours
};

// A box in memory that is filled from one tensor of the files.
typedef struct fsdpi_ck_want {
    char *to; // its first element
    fsdp_dtype dtype;
    int32_t memory, ndim, transpose;
    int64_t start[FSDP_MAX_DIMS], shape[FSDP_MAX_DIMS]; // in that tensor; before transposing
} fsdpi_ck_want;

typedef struct fsdpi_ck_item {
    int32_t want, part;
    int64_t box, at; // index of the box; place of its first run, in the data of the file
} fsdpi_ck_item;

typedef struct fsdpi_ck_read_op { // one read of the worker
    int32_t part;
    int64_t at, nbytes; // in the data of the file
    char *to;
} fsdpi_ck_read_op;

typedef struct fsdpi_ck_run_op { // and what is copied behind it
    const char *from;
    char *to;
    int64_t elements, step; // step: elements of `to` from one to the next
    fsdp_dtype from_dtype, to_dtype;
    int32_t memory;
} fsdpi_ck_run_op;

typedef struct fsdpi_ck_reader {
    fsdpi_ck_io *io;
    const fsdpi_ck_opened *o;
    fsdpi_ck_room wants, items, scratch, block, turn; // turn: elements in the order of `to`
    int32_t num_wants;
    int64_t num_items;
    fsdpi_ck_read_op reads[FSDPI_CK_READS];
    fsdpi_ck_run_op runs[FSDPI_CK_RUNS];
    int32_t num_reads, num_runs, reads_done;
    int64_t used; // of scratch
    int check;    // 1: checksums
    int last;     // 1: there is no job behind this one
    int32_t part; // that is open; -1: none
    void *file;
    int64_t next; // of the block whose checksum is under way; -1: none
    uint32_t crc;
    char path[FSDP_CHECKPOINT_PATH];
    int64_t read_bytes, calls;
} fsdpi_ck_reader;

/* -------------------------------------------------------------------------------------------- */
// The worker's side: reads, and the checksum of every block that they touch.

static void fsdpi_ck_get(fsdpi_ck_reader *r, char *to, int64_t nbytes, int64_t at) {
    (void)fsdpi_ck_read(r->io->disk, r->file, r->path, to, nbytes,
                        r->o->parts[r->part].header + at);
    r->read_bytes += nbytes;
    r->calls++;
}
static int64_t fsdpi_ck_block_end(const fsdpi_ck_reader *r, int64_t at) {
    const fsdpi_ck_part *p = &r->o->parts[r->part];
    int64_t end = (at / FSDPI_CK_BLOCK + 1) * FSDPI_CK_BLOCK;
    return end < p->bytes - p->header ? end : p->bytes - p->header;
}

// The next bytes of the block under way; its end compares.
static void fsdpi_ck_check_bytes(fsdpi_ck_reader *r, const char *from, int64_t nbytes) {
    while (nbytes > 0 && !r->io->disk->status) {
        int64_t end = fsdpi_ck_block_end(r, r->next), n = end - r->next;
        if (n > nbytes) n = nbytes;
        if (r->next % FSDPI_CK_BLOCK == 0) r->crc = 0;
        r->crc = fsdp_crc32c(r->crc, from, n);
        from += n, nbytes -= n, r->next += n;
        int64_t block = (r->next - 1) / FSDPI_CK_BLOCK;
        uint32_t expected = r->o->parts[r->part].crcs[block];
        if (r->next == end && r->crc != expected)
            (void)fsdpi_ck_fault(r->io->disk, FSDP_ERR_CORRUPT,
                                 "%s: block %lld (bytes %lld..%lld of the data) has CRC %08x, "
                                 "expected %08x: the file was changed, or the disk fails; try an "
                                 "older checkpoint (max_step of fsdp_checkpoint_find)",
                                 r->path, (long long)block, (long long)(block * FSDPI_CK_BLOCK),
                                 (long long)end, (unsigned)r->crc, (unsigned)expected);
    }
}
// Bytes that nobody wants, for the checksum of their block: up to `to`.
static void fsdpi_ck_fill_up(fsdpi_ck_reader *r, int64_t to) {
    if (to <= r->next || r->io->disk->status) return;
    fsdpi_ck_get(r, (char *)r->block.ptr, to - r->next, r->next);
    if (!r->io->disk->status) fsdpi_ck_check_bytes(r, (char *)r->block.ptr, to - r->next);
}
// The block under way to its end.
static void fsdpi_ck_end_block(fsdpi_ck_reader *r) {
    if (r->next >= 0 && r->next % FSDPI_CK_BLOCK)
        fsdpi_ck_fill_up(r, fsdpi_ck_block_end(r, r->next - 1));
    r->next = -1;
}

static void fsdpi_ck_leave_part(fsdpi_ck_reader *r) {
    if (r->part < 0) return;
    if (r->check && r->o->parts[r->part].crcs) fsdpi_ck_end_block(r);
    (void)fsdpi_ck_close(r->io->disk, r->file, r->path);
    r->part = -1;
    r->file = NULL;
}
static void fsdpi_ck_enter_part(fsdpi_ck_reader *r, int32_t part) {
    int64_t nbytes = 0;
    const fsdpi_ck_part *p = &r->o->parts[part];
    if (part == r->part) return;
    fsdpi_ck_leave_part(r);
    int fits = !r->o->is_file ? fsdpi_ck_join(r->path, r->o->dir, p->name)
                              : snprintf(r->path, sizeof r->path, "%s", r->o->dir) > 0;
    if (!fits || fsdpi_ck_open(r->io->disk, r->path, 0, &r->file, &nbytes)) return;
    r->part = part;
    r->next = -1;
    if (nbytes != p->bytes)
        (void)fsdpi_ck_fault(r->io->disk, FSDP_ERR_CORRUPT,
                             "%s has %lld bytes, %lld before: it "
                             "was changed while it was read",
                             r->path, (long long)nbytes, (long long)p->bytes);
}

static void fsdpi_ck_read_ops(void *arg) {
    fsdpi_ck_reader *r = (fsdpi_ck_reader *)arg;
    for (int i = 0; i < r->num_reads && !r->io->disk->status; i++) {
        const fsdpi_ck_read_op *op = &r->reads[i];
        fsdpi_ck_enter_part(r, op->part);
        if (r->io->disk->status) break;
        int check = r->check && r->o->parts[op->part].crcs;
        if (check) {
            int64_t begin = op->at / FSDPI_CK_BLOCK * FSDPI_CK_BLOCK;
            if (r->next < begin || r->next > op->at) { // not the block under way
                fsdpi_ck_end_block(r);
                r->next = begin;
            }
            fsdpi_ck_fill_up(r, op->at);
        }
        int64_t most = check ? (int64_t)FSDPI_CK_SLICE : op->nbytes;
        for (int64_t at = 0, n; at < op->nbytes && !r->io->disk->status; at += n) {
            n = fsdpi_ck_less(op->nbytes - at, most);
            fsdpi_ck_get(r, op->to + at, n, op->at + at);
            if (check && !r->io->disk->status) fsdpi_ck_check_bytes(r, op->to + at, n);
        }
    }
    if (r->last || r->io->disk->status) fsdpi_ck_leave_part(r);
}

/* -------------------------------------------------------------------------------------------- */
// The caller's side: runs become reads and copies.

// Elements from scratch to where they belong: cast, turned, or to a device.
static fsdp_status fsdpi_ck_copy_run(fsdpi_ck_reader *r, const fsdpi_ck_run_op *op) {
    int64_t size = (int64_t)fsdp_dtype_size(op->to_dtype);
    int64_t from_size = (int64_t)fsdp_dtype_size(op->from_dtype);
    char *to = op->to;
    if (op->step != 1) {
        for (int64_t i = 0; i < op->elements; i++)
            (void)fsdp_convert(to + i * op->step * size, op->to_dtype, op->from + i * from_size,
                               op->from_dtype, 1);
        return FSDP_OK;
    }
    if (op->memory != FSDP_MEMORY_DEVICE)
        return fsdp_convert(to, op->to_dtype, op->from, op->from_dtype, op->elements);
    const char *from = op->from;
    if (op->to_dtype != op->from_dtype) {
        fsdp_status status = fsdpi_ck_reserve(r->io->model, &r->turn, op->elements * size, 0);
        if (status) return status;
        (void)fsdp_convert(r->turn.ptr, op->to_dtype, from, op->from_dtype, op->elements);
        from = (const char *)r->turn.ptr;
    }
    return fsdp_transfer(r->io->model, to, from, op->elements * size);
}

static fsdp_status fsdpi_ck_flush_reads(fsdpi_ck_reader *r, int last) {
    r->last = last;
    fsdp_status status = r->num_reads || last ? fsdpi_ck_do(r->io, fsdpi_ck_read_ops, r) : FSDP_OK;
    for (int i = 0; i < r->num_runs && !status; i++) status = fsdpi_ck_copy_run(r, &r->runs[i]);
    r->num_reads = r->num_runs = 0;
    r->used = 0;
    return status;
}

// Straight into memory, joined with the read before if that ends where this one begins.
static fsdp_status fsdpi_ck_read_straight(fsdpi_ck_reader *r, int32_t part, int64_t at,
                                          int64_t nbytes, char *to) {
    fsdpi_ck_read_op *op = r->num_reads ? &r->reads[r->num_reads - 1] : NULL;
    if (op && op->part == part && op->at + op->nbytes == at && op->to + op->nbytes == to) {
        op->nbytes += nbytes;
        return FSDP_OK;
    }
    fsdp_status status = r->num_reads == FSDPI_CK_READS ? fsdpi_ck_flush_reads(r, 0) : FSDP_OK;
    op = &r->reads[r->num_reads++];
    op->part = part, op->at = at, op->nbytes = nbytes, op->to = to;
    return status;
}

// Through scratch. Short runs near each other are one read, if at least a quarter of it is wanted.
static fsdp_status fsdpi_ck_read_run(fsdpi_ck_reader *r, int32_t part, int64_t at,
                                     fsdpi_ck_run_op run, int64_t *wanted) {
    int64_t nbytes = run.elements * (int64_t)fsdp_dtype_size(run.from_dtype);
    fsdpi_ck_read_op *op = r->num_reads ? &r->reads[r->num_reads - 1] : NULL;
    char *scratch = (char *)r->scratch.ptr;
    int joins = op && *wanted && op->part == part && r->num_runs < FSDPI_CK_RUNS &&
                op->at + op->nbytes <= at && at + nbytes - op->at <= 4 * (*wanted + nbytes) &&
                (at - op->at) % (int64_t)fsdp_dtype_size(run.from_dtype) == 0 && // aligned
                op->to - scratch + (at + nbytes - op->at) <= FSDPI_CK_PIECE;
    if (joins) {
        op->nbytes = at + nbytes - op->at;
        *wanted += nbytes;
    } else {
        r->used = (r->used + 63) / 64 * 64;
        if (r->num_reads == FSDPI_CK_READS || r->num_runs == FSDPI_CK_RUNS ||
            r->used + nbytes > FSDPI_CK_PIECE) {
            fsdp_status status = fsdpi_ck_flush_reads(r, 0);
            if (status) return status;
        }
        op = &r->reads[r->num_reads++];
        op->part = part, op->at = at, op->nbytes = nbytes, op->to = scratch + r->used;
        *wanted = nbytes;
    }
    run.from = op->to + (at - op->at);
    r->used = op->to - scratch + op->nbytes;
    r->runs[r->num_runs++] = run;
    return FSDP_OK;
}

static void fsdpi_ck_overlap_of(const fsdpi_ck_reader *r, const fsdpi_ck_want *w, int64_t box,
                                fsdp_box_overlap *out) {
    const fsdp_safetensors_entry *e = r->o->boxes[box].entry;
    fsdp_box_begin(w->ndim, e->start, e->shape, w->start, w->shape, out);
}

// All runs of an item.
static fsdp_status fsdpi_ck_read_item(fsdpi_ck_reader *r, const fsdpi_ck_item *item,
                                      int64_t *wanted) {
    const fsdpi_ck_want *w = (const fsdpi_ck_want *)r->wants.ptr + item->want;
    const fsdp_safetensors_entry *e = r->o->boxes[item->box].entry;
    const int64_t size = (int64_t)fsdp_dtype_size(e->dtype);
    const int64_t to_size = (int64_t)fsdp_dtype_size(w->dtype);
    fsdp_status status = FSDP_OK;
    fsdp_box_overlap o;
    fsdpi_ck_overlap_of(r, w, item->box, &o);
    int straight = w->memory != FSDP_MEMORY_DEVICE && w->dtype == e->dtype && !w->transpose;
    do {
        int64_t most = FSDPI_CK_PIECE / (size > to_size ? size : to_size);
        for (int64_t k = 0, n; k < o.elements && !status; k += n) {
            int64_t at = e->begin + (o.src + k) * size, dst = o.dst + k;
            n = o.elements - k < most ? o.elements - k : most;
            if (w->transpose) n = fsdpi_ck_less(n, w->shape[1] - dst % w->shape[1]); // of one row
            if (straight && o.elements * size >= FSDPI_CK_SHORT) n = o.elements;
            if (straight && (o.rows == 1 || o.elements * size >= FSDPI_CK_SHORT)) {
                status = fsdpi_ck_read_straight(r, item->part, at, n * size, w->to + dst * size);
                *wanted = 0;
                continue;
            }
            fsdpi_ck_run_op run = {NULL, w->to, n, 1, e->dtype, w->dtype, w->memory};
            if (w->transpose) { // element (c, r) of the file is (r, c) in memory
                dst = dst % w->shape[1] * w->shape[0] + dst / w->shape[1];
                run.step = w->shape[0];
            }
            run.to += dst * to_size;
            status = fsdpi_ck_read_run(r, item->part, at, run, wanted);
        }
    } while (!status && fsdp_box_next(&o));
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// What is wanted.

/* A box that is filled from the boxes first .. first + count - 1 of a tensor. */
static fsdp_status fsdpi_ck_add_want(fsdpi_ck_reader *r, const fsdpi_ck_want *w, int64_t first,
                                     int64_t count) {
    const int64_t size = (int64_t)sizeof *w, item = (int64_t)sizeof(fsdpi_ck_item);
    fsdp_status status = fsdpi_ck_reserve(r->io->model, &r->wants, (r->num_wants + 1) * size,
                                          r->num_wants * size);
    if (status) return status;
    memcpy((fsdpi_ck_want *)r->wants.ptr + r->num_wants, w, sizeof *w);
    for (int64_t i = first; i < first + count; i++) {
        const fsdp_safetensors_entry *e = r->o->boxes[i].entry;
        fsdp_box_overlap o;
        if (i > first && fsdpi_ck_same_box(r->o->boxes[i - 1].entry, e)) continue;
        fsdpi_ck_overlap_of(r, w, i, &o);
        if (!o.rows) continue;
        status = fsdpi_ck_reserve(r->io->model, &r->items, (r->num_items + 1) * item,
                                  r->num_items * item);
        if (status) return status;
        fsdpi_ck_item *x = (fsdpi_ck_item *)r->items.ptr + r->num_items++;
        x->want = r->num_wants;
        x->part = r->o->boxes[i].file;
        x->box = i;
        x->at = e->begin + o.src * (int64_t)fsdp_dtype_size(e->dtype);
    }
    r->num_wants++;
    return FSDP_OK;
}

static int fsdpi_ck_by_place(const void *a, const void *b) {
    const fsdpi_ck_item *x = (const fsdpi_ck_item *)a, *y = (const fsdpi_ck_item *)b;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->want < y->want ? -1 : x->want > y->want;
}

static fsdp_status fsdpi_ck_reader_init(fsdpi_ck_reader *r, fsdpi_ck_io *io,
                                        const fsdpi_ck_opened *o, int check) {
    memset(r, 0, sizeof *r);
    r->io = io, r->o = o, r->check = check;
    r->part = -1, r->next = -1;
    fsdp_status status = fsdpi_ck_reserve(io->model, &r->scratch, FSDPI_CK_PIECE, 0);
    return status ? status : fsdpi_ck_reserve(io->model, &r->block, FSDPI_CK_BLOCK, 0);
}
static void fsdpi_ck_reader_end(fsdpi_ck_reader *r) {
    fsdpi_ck_room *rooms[] = {&r->wants, &r->items, &r->scratch, &r->block, &r->turn};
    for (int i = 0; i < 5; i++) fsdpi_ck_drop(r->io, rooms[i]);
}

/* Read all that is wanted, and forget it. */
static fsdp_status fsdpi_ck_read_all(fsdpi_ck_reader *r) {
    fsdpi_ck_item *items = (fsdpi_ck_item *)r->items.ptr;
    fsdp_status status = FSDP_OK;
    int64_t wanted = 0;
    if (r->num_items) qsort(items, (size_t)r->num_items, sizeof *items, fsdpi_ck_by_place);
    for (int64_t i = 0; i < r->num_items && !status; i++)
        status = fsdpi_ck_read_item(r, &items[i], &wanted);
    if (!status) status = fsdpi_ck_flush_reads(r, 1);
    else if (r->part >= 0) { // the copies failed, and the file is open
        r->num_reads = r->num_runs = 0;
        (void)fsdpi_ck_flush_reads(r, 1);
    }
    r->num_items = 0, r->num_wants = 0;
    return status;
}

/* Checksums of blocks mine, mine + of, ... of all files: a job. */
typedef struct fsdpi_ck_verify_job {
    fsdpi_ck_reader *r;
    int64_t mine, of, num_blocks;
} fsdpi_ck_verify_job;
static void fsdpi_ck_verify_blocks(void *arg) {
    fsdpi_ck_verify_job *v = (fsdpi_ck_verify_job *)arg;
    fsdpi_ck_reader *r = v->r;
    int64_t number = 0;
    for (int32_t i = 0; i < r->o->num_parts && !r->io->disk->status; i++) {
        const fsdpi_ck_part *p = &r->o->parts[i];
        for (int64_t at = 0; at < p->bytes - p->header && p->crcs; at += FSDPI_CK_BLOCK) {
            if (number++ % v->of != v->mine || r->io->disk->status) continue;
            fsdpi_ck_enter_part(r, i);
            if (r->io->disk->status) break;
            int64_t n = fsdpi_ck_block_end(r, at) - at;
            r->next = at;
            fsdpi_ck_get(r, (char *)r->block.ptr, n, at);
            if (!r->io->disk->status) fsdpi_ck_check_bytes(r, (const char *)r->block.ptr, n);
            r->next = -1;
            v->num_blocks++;
        }
    }
    fsdpi_ck_leave_part(r);
}


/* ==== checkpoint/load.h =====================================================================
   a load: what this rank wants, from which tensor of the files */

// Owns: the plan of a load. Everything that can be wrong about names, shapes and dtypes is found
// before anything is changed; the ranks agree on it.

typedef struct fsdpi_ck_load {
    fsdp_checkpoint *ck;
    fsdp_checkpoint_load_desc desc;
    fsdpi_ck_io *io;
    fsdpi_ck_opened opened;
    fsdpi_ck_reader reader;
    fsdpi_ck_room numbers; // f64 or i64 as they were read, for the numbers of extensions
    fsdpi_ck_room flags;   // of each tensor of the table: FSDPI_CK_*
    fsdpi_ck_verify_job verify;
    char missing[512], extra[512];
    int num_missing, num_extra;
} fsdpi_ck_load;

// What becomes of a tensor: it keeps its value, is read, is read as an integer, or becomes zero.
enum { FSDPI_CK_LEFT = 0, FSDPI_CK_READ, FSDPI_CK_INTEGER, FSDPI_CK_ZERO };

// At most three names in a text.
static void fsdpi_ck_name_some(char *text, size_t cap, int count, const char *name) {
    size_t used = strlen(text);
    if (count <= 3) snprintf(text + used, cap - used, "%s'%.120s'", count > 1 ? ", " : "", name);
    else if (count == 4) snprintf(text + used, cap - used, ", ...");
}

static void fsdpi_ck_shape_text(char *out, size_t cap, fsdp_dtype dtype, int ndim,
                                const int64_t *shape) {
    size_t used = (size_t)snprintf(out, cap, "%s [",
                                   dtype == FSDP_SAFETENSORS_OTHER ? "another dtype"
                                                                   : fsdp_dtype_name(dtype));
    for (int d = 0; d < ndim && d < FSDP_MAX_DIMS && used < cap; d++)
        used += (size_t)snprintf(out + used, cap - used, d ? ", %lld" : "%lld",
                                 (long long)shape[d]);
    if (used < cap) snprintf(out + used, cap - used, "]");
}

static fsdp_status fsdpi_ck_differs(fsdpi_ck_load *l, const char *name, fsdp_dtype there,
                                    int there_ndim, const int64_t *there_shape,
                                    const fsdpi_ck_tensor *x, const char *hint) {
    char a[160], b[160];
    fsdpi_ck_shape_text(a, sizeof a, there, there_ndim, there_shape);
    fsdpi_ck_shape_text(b, sizeof b, x->file_dtype, x->ndim, x->whole);
    return fsdp_fail(l->ck->world, FSDP_ERR_INVALID_ARG,
                     "[E436] %s: '%s' is %s there, and %s here%s", l->io->call, name, a, b, hint);
}

// May elements of dtype `there` become elements of x?
static int fsdpi_ck_takes(const fsdpi_ck_load *l, const fsdpi_ck_tensor *x, fsdp_dtype there) {
    if (there == x->file_dtype) return 1;
    if (x->file_dtype != x->dtype) return there == FSDP_F32 || there == FSDP_I64; // a number
    return l->desc.convert && there != FSDP_SAFETENSORS_OTHER && fsdp_dtype_is_float(there) &&
           fsdp_dtype_is_float(x->file_dtype);
}

/* One source of a tensor: rows of dim 0 (after transposing) that begin at `row` of the whole. */
static fsdp_status fsdpi_ck_want_source(fsdpi_ck_load *l, const fsdpi_ck_tensor *x,
                                        const fsdp_checkpoint_source *s, int64_t first_box,
                                        int64_t count, int64_t *row, char *to) {
    const fsdpi_ck_box *boxes = l->opened.boxes + first_box;
    const fsdp_safetensors_entry *e = boxes[0].entry;
    int64_t whole[FSDP_MAX_DIMS] = {0}, there[FSDP_MAX_DIMS] = {0};
    fsdpi_ck_want w;
    memset(&w, 0, sizeof w);
    if (e->ndim > FSDP_MAX_DIMS || e->dtype == FSDP_SAFETENSORS_OTHER)
        return fsdp_fail(l->ck->world, FSDP_ERR_UNSUPPORTED,
                         "[E437] %s: '%s' is %s with %d dims there, which the library does not "
                         "have: leave it out by desc.source",
                         l->io->call, s->name, fsdp_safetensors_dtype_name(e->file_dtype), e->ndim);
    fsdpi_ck_whole(boxes, (int)count, there);
    memcpy(whole, there, sizeof whole);
    if (s->transpose && e->ndim == 2) whole[0] = there[1], whole[1] = there[0];
    int64_t rows = s->rows ? s->rows : whole[0] - s->first;
    int same = e->ndim == x->ndim && (!s->transpose || x->ndim == 2) && s->first >= 0 && rows >= 0;
    for (int d = 0; d < x->ndim && same; d++)
        same = d ? whole[d] == x->whole[d]
                 : rows <= whole[0] - s->first && rows <= x->whole[0] - *row &&
                       (l->desc.source || rows == x->whole[0]);
    if (!same) return fsdpi_ck_differs(l, s->name, e->dtype, e->ndim, there, x, "");
    if (!fsdpi_ck_takes(l, x, e->dtype))
        return fsdpi_ck_differs(l, s->name, e->dtype, e->ndim, there, x,
                                fsdp_dtype_is_float(e->dtype) && fsdp_dtype_is_float(x->file_dtype)
                                    ? ": set convert"
                                    : "");
    w.ndim = x->ndim;
    w.memory = x->memory;
    w.dtype = x->dtype;
    w.transpose = s->transpose;
    w.to = to;
    memcpy(w.start, x->start, sizeof w.start);
    memcpy(w.shape, x->shape, sizeof w.shape);
    if (x->ndim) { // rows [*row, *row + rows) of the whole, as far as they are in this rank's box
        int64_t begin = x->start[0] > *row ? x->start[0] : *row;
        int64_t end = x->start[0] + x->shape[0] < *row + rows ? x->start[0] + x->shape[0]
                                                              : *row + rows;
        w.start[0] = begin - *row + s->first;
        w.shape[0] = end > begin ? end - begin : 0;
        w.to += (begin - x->start[0]) * fsdpi_ck_volume(x->ndim - 1, x->shape + 1) *
                (int64_t)fsdp_dtype_size(x->dtype);
        if (!w.shape[0]) w.to = to;
    }
    *row += rows;
    if (s->transpose) {
        int64_t start = w.start[0], shape = w.shape[0];
        w.start[0] = w.start[1], w.shape[0] = w.shape[1];
        w.start[1] = start, w.shape[1] = shape;
    }
    if (!fsdpi_ck_volume(x->ndim, w.shape)) return FSDP_OK;
    return fsdpi_ck_add_want(&l->reader, &w, first_box, count);
}

// Which sources a tensor has: those of the trainer, or its own name.
static int fsdpi_ck_sources(fsdpi_ck_load *l, const fsdpi_ck_tensor *x,
                            fsdp_checkpoint_source *out) {
    memset(out, 0, FSDP_CHECKPOINT_SOURCES * sizeof *out);
    snprintf(out[0].name, sizeof out[0].name, "%s", x->name);
    if (!l->desc.source || x->place != 0 || x->blob >= 0) return 1;
    return l->desc.source(l->desc.user, &x->view, out);
}

// Does the checkpoint have a tensor whose name begins so?
static int fsdpi_ck_has_prefix(const fsdpi_ck_opened *o, const char *prefix) {
    int64_t first;
    (void)fsdpi_ck_boxes_of(o, prefix, &first);
    return first < o->num_boxes &&
           strncmp(o->boxes[first].entry->name, prefix, strlen(prefix)) == 0;
}
// Does it have any of this parameter?
static int fsdpi_ck_has_states_of(const fsdpi_ck_load *l, const fsdpi_ck_tensor *x) {
    char prefix[FSDP_CHECKPOINT_NAME + 32];
    snprintf(prefix, sizeof prefix, "optim.state.%s.", fsdpi_ck_param_of(&l->ck->table, x)->name);
    return fsdpi_ck_has_prefix(&l->opened, prefix);
}

// The checkpoint lacks a tensor: what becomes of it?
static int fsdpi_ck_without(fsdpi_ck_load *l, const fsdpi_ck_tensor *x, const char *name) {
    const fsdp_checkpoint_blob *b = x->blob >= 0 ? fsdpi_ck_blob(l->ck, x->blob) : NULL;
    if (b && (b->optional || (b->per_rank && l->opened.world != l->ck->size))) return FSDPI_CK_LEFT;
    if (x->place != 0 && x->ordinal >= 0 && fsdpi_ck_has_prefix(&l->opened, "optim.state.") &&
        !fsdpi_ck_has_states_of(l, x))
        return FSDPI_CK_ZERO;
    fsdpi_ck_name_some(l->missing, sizeof l->missing, ++l->num_missing, name);
    return FSDPI_CK_LEFT;
}

static fsdp_status fsdpi_ck_plan_tensor(fsdpi_ck_load *l, int index) {
    fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(&l->ck->table, index);
    char *flag = (char *)l->flags.ptr + index;
    fsdp_checkpoint_source s[FSDP_CHECKPOINT_SOURCES];
    int64_t row = 0, first = 0;
    *flag = FSDPI_CK_LEFT;
    // Without elements neither a parameter nor its states are in files.
    const fsdpi_ck_tensor *p = x->ordinal < 0 ? x : fsdpi_ck_param_of(&l->ck->table, x);
    if (fsdpi_ck_volume(p->ndim, p->whole) == 0) return FSDP_OK;
    const fsdp_checkpoint_blob *b = x->blob >= 0 ? fsdpi_ck_blob(l->ck, x->blob) : NULL;
    if (b && b->per_rank && l->opened.world != l->ck->size) return FSDP_OK;
    int num = fsdpi_ck_sources(l, x, s), found = 0;
    if (num < 0 || num > FSDP_CHECKPOINT_SOURCES)
        return fsdp_fail(l->ck->world, FSDP_ERR_INVALID_ARG,
                         "[E438] %s: desc.source gives %d sources of '%s', expected 0 to %d",
                         l->io->call, num, x->name, FSDP_CHECKPOINT_SOURCES);
    for (int i = 0; i < num; i++) found += fsdpi_ck_boxes_of(&l->opened, s[i].name, &first) > 0;
    if (num && !found) {
        *flag = (char)fsdpi_ck_without(l, x, s[0].name);
        return FSDP_OK;
    }
    char *to = (char *)x->data;
    if (x->file_dtype != x->dtype) to = (char *)l->numbers.ptr + 8 * (int64_t)index;
    for (int i = 0; i < num; i++) {
        int64_t count = fsdpi_ck_boxes_of(&l->opened, s[i].name, &first);
        if (!count) {
            fsdpi_ck_name_some(l->missing, sizeof l->missing, ++l->num_missing, s[i].name);
            continue;
        }
        fsdpi_ck_tensor number = *x;
        if (x->file_dtype != x->dtype) {
            fsdp_dtype there = l->opened.boxes[first].entry->dtype;
            number.memory = FSDP_MEMORY_HOST;
            number.dtype = there == FSDP_I64 ? FSDP_I64 : FSDP_F64;
            if (fsdpi_ck_takes(l, x, there)) number.file_dtype = there;
        }
        fsdp_status status = fsdpi_ck_want_source(l, &number, &s[i], first, count, &row, to);
        if (status) return status;
        *flag = x->file_dtype != x->dtype && number.dtype == FSDP_I64 ? FSDPI_CK_INTEGER
                                                                      : FSDPI_CK_READ;
    }
    if (num && x->ndim && row != x->whole[0] && !l->num_missing)
        return fsdp_fail(l->ck->world, FSDP_ERR_INVALID_ARG,
                         "[E439] %s: the sources of '%s' have %lld rows, expected %lld",
                         l->io->call, x->name, (long long)row, (long long)x->whole[0]);
    return FSDP_OK;
}

// Names that nobody on this rank has asked for.
static void fsdpi_ck_count_extra(fsdpi_ck_load *l) {
    const fsdpi_ck_opened *o = &l->opened;
    for (int64_t i = 0; i < o->num_boxes; i++) {
        const char *name = o->boxes[i].entry->name;
        if (i && strcmp(o->boxes[i - 1].entry->name, name) == 0) continue;
        if (strncmp(name, "fsdp.blob.", 10) == 0 || fsdpi_ck_find_tensor(&l->ck->table, name))
            continue;
        if (l->desc.params_only && fsdpi_ck_is_reserved(name)) continue;
        fsdpi_ck_name_some(l->extra, sizeof l->extra, ++l->num_extra, name);
    }
}

static fsdp_status fsdpi_ck_plan(fsdpi_ck_load *l) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < l->ck->table.num && !status; i++) status = fsdpi_ck_plan_tensor(l, i);
    if (status) return status;
    fsdpi_ck_count_extra(l);
    if (!l->num_missing || l->desc.partial) return FSDP_OK;
    return fsdp_fail(
        l->ck->world, FSDP_ERR_INVALID_ARG,
        "[E440] %s: %s lacks %d of %d tensors: %s; it has %d that nobody asks for%s%s: "
        "set partial to leave them as they are, or give desc.source",
        l->io->call, l->opened.dir, l->num_missing, l->ck->table.num, l->missing, l->num_extra,
        l->num_extra ? ": " : "", l->extra);
}

/* -------------------------------------------------------------------------------------------- */
// Phases. In each of them a rank does its own part and then follows the others.

// Rank 0 fetches the headers, all get them.
static fsdp_status fsdpi_ck_share_bulk(fsdpi_ck_load *l, const char *path) {
    fsdp_checkpoint *ck = l->ck;
    fsdp_status mine = ck->rank == 0 ? fsdpi_ck_fetch(l->io, path, &l->opened.bulk) : FSDP_OK;
    fsdp_status status = fsdpi_ck_follow(ck, l->io->call, mine);
    if (status) return status;
    status = fsdp_broadcast(ck->world, NULL, &l->opened.bulk.used, 8, 0);
    if (status) return status;
    mine = fsdpi_ck_reserve(ck->model, &l->opened.bulk.room, l->opened.bulk.used,
                            ck->rank == 0 ? l->opened.bulk.used : 0);
    status = fsdpi_ck_agree(ck->world, l->io->call, mine);
    if (!status && ck->size > 1)
        status = fsdp_broadcast(ck->world, NULL, l->opened.bulk.room.ptr, l->opened.bulk.used, 0);
    return status;
}

static fsdp_status fsdpi_ck_understand_and_plan(fsdpi_ck_load *l) {
    fsdp_checkpoint *ck = l->ck;
    int check = l->desc.verify != FSDP_VERIFY_NONE;
    fsdp_status status = fsdpi_ck_understand(l->io, &l->opened);
    if (!status) status = fsdpi_ck_tabulate(ck, l->io->call, l->desc.params_only || l->desc.source);
    if (!status) status = fsdpi_ck_reader_init(&l->reader, l->io, &l->opened, check);
    if (!status) status = fsdpi_ck_reserve(ck->model, &l->numbers, 8 * (ck->table.num + 1), 0);
    if (!status) status = fsdpi_ck_reserve(ck->model, &l->flags, ck->table.num + 1, 0);
    return status ? status : fsdpi_ck_plan(l);
}

static fsdp_status fsdpi_ck_verify_all(fsdpi_ck_load *l) {
    l->verify.r = &l->reader;
    l->verify.mine = l->ck->rank, l->verify.of = l->ck->size;
    return fsdpi_ck_do(l->io, fsdpi_ck_verify_blocks, &l->verify);
}

// Zeros for states that the checkpoint lacks; numbers to where they belong.
static fsdp_status fsdpi_ck_settle(fsdpi_ck_load *l) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < l->ck->table.num && !status; i++) {
        fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(&l->ck->table, i);
        char flag = ((const char *)l->flags.ptr)[i];
        char *number = (char *)l->numbers.ptr + 8 * (int64_t)i;
        int64_t nbytes = x->numel * (int64_t)fsdp_dtype_size(x->dtype);
        if (flag == FSDPI_CK_ZERO && x->memory == FSDP_MEMORY_DEVICE) {
            memset(l->reader.scratch.ptr, 0, FSDPI_CK_PIECE);
            for (int64_t at = 0, n; at < nbytes && !status; at += n) {
                n = fsdpi_ck_less(nbytes - at, FSDPI_CK_PIECE);
                status = fsdp_transfer(l->ck->model, (char *)x->data + at, l->reader.scratch.ptr,
                                       n);
            }
        } else if (flag == FSDPI_CK_ZERO) {
            memset(x->data, 0, (size_t)nbytes);
        } else if (x->file_dtype != x->dtype && flag == FSDPI_CK_READ) {
            double value;
            memcpy(&value, number, 8);
            *(int64_t *)x->data = value >= 0 && value <= 9007199254740992.0 ? (int64_t)value : -1;
        } else if (flag == FSDPI_CK_INTEGER) {
            memcpy(x->data, number, 8);
        }
    }
    return status;
}

// Read into the model. From here on a failure leaves it undefined.
static fsdp_status fsdpi_ck_read_model(fsdpi_ck_load *l) {
    fsdp_status status = fsdp_params_writable(l->ck->model);
    if (!status) status = fsdpi_ck_read_all(&l->reader);
    return status ? status : fsdpi_ck_settle(l);
}

// What the ranks have to pass alike. l is NULL without memory: then another rank's failure counts.
static void fsdpi_ck_load_args(const fsdpi_ck_load *l, const char *path, fsdpi_ck_args *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->path, sizeof out->path, "%s", path ? path : "");
    out->params_only = l && l->desc.params_only;
    out->has_source = l && l->desc.source;
    out->verify = l ? l->desc.verify : 0;
}

static void fsdpi_ck_report_load(fsdpi_ck_load *l, int64_t begin_ns) {
    fsdp_checkpoint_report *r = &l->ck->report;
    int rank_blobs = 1;
    for (int i = 0; i < l->ck->desc.num_blobs; i++)
        if (fsdpi_ck_blob(l->ck, i)->per_rank && l->opened.world != l->ck->size) rank_blobs = 0;
    memset(r, 0, sizeof *r);
    r->step = l->opened.step;
    r->bytes = l->reader.read_bytes;
    r->total_bytes = l->opened.total_bytes;
    r->blocked_ns = r->total_ns = fsdpi_ck_now() - begin_ns;
    r->num_reads = l->reader.calls;
    r->num_missing = l->num_missing;
    r->num_extra = l->num_extra;
    r->per_rank_blobs = rank_blobs;
    r->verified = l->opened.step >= 0 && l->desc.verify != FSDP_VERIFY_NONE;
}

static fsdp_status fsdpi_ck_load_all(fsdpi_ck_load *l, const char *path) {
    fsdp_checkpoint *ck = l->ck;
    const char *call = l->io->call;
    fsdp_status status = fsdpi_ck_share_bulk(l, path);
    if (status) return status;
    l->opened.dir = path;
    status = fsdpi_ck_agree(ck->world, call, fsdpi_ck_understand_and_plan(l));
    if (!status && l->desc.verify == FSDP_VERIFY_ALL)
        status = fsdpi_ck_follow(ck, call, fsdpi_ck_verify_all(l));
    if (!status) status = fsdpi_ck_follow(ck, call, fsdpi_ck_read_model(l));
    if (status) return status;
    status = l->desc.params_only || l->desc.source ? FSDP_OK : fsdp_state_written(ck->model);
    if (!status) status = fsdp_params_changed(ck->model);
    return fsdpi_ck_agree(ck->world, call, status);
}


/* ==== checkpoint/life.h =====================================================================
   the public functions of a model's checkpoints */

/* -------------------------------------------------------------------------------------------- */
// Begin and end of an object.

static fsdp_status fsdpi_ck_null(fsdp_world *w, const char *call, const char *which) {
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG, "[E441] %s: %s is NULL", call, which);
}

static int fsdpi_ck_good_blob_name(const char *name) {
    size_t n = name ? strlen(name) : 0;
    if (n < 1 || n > 64) return 0;
    for (; *name; name++)
        if (!((*name >= 'a' && *name <= 'z') || (*name >= 'A' && *name <= 'Z') ||
              (*name >= '0' && *name <= '9') || *name == '_' || *name == '.' || *name == '-'))
            return 0;
    return 1;
}

static fsdp_status fsdpi_ck_copy_blobs(fsdp_checkpoint *ck, const char *call) {
    const fsdp_checkpoint_desc *d = &ck->desc;
    if (d->num_blobs < 0 || (d->num_blobs && !d->blobs))
        return fsdpi_ck_null(ck->world, call, "desc.blobs");
    int64_t size = (int64_t)sizeof(fsdp_checkpoint_blob) + 80;
    fsdp_status status = fsdpi_ck_reserve(ck->model, &ck->blobs, d->num_blobs * size, 0);
    if (status) return status;
    fsdp_checkpoint_blob *to = (fsdp_checkpoint_blob *)ck->blobs.ptr;
    char *names = (char *)(to + d->num_blobs);
    for (int i = 0; i < d->num_blobs; i++) {
        const fsdp_checkpoint_blob *b = &d->blobs[i];
        if (!fsdpi_ck_good_blob_name(b->name) || b->nbytes < 0 || (b->nbytes && !b->data))
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                             "[E442] %s: blob %d: expected a name of 1 to 64 letters, digits, '_', "
                             "'.' or '-', and data of nbytes >= 0",
                             call, i);
        for (int k = 0; k < i; k++)
            if (strcmp(to[k].name, b->name) == 0)
                return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                                 "[E443] %s: blobs %d and %d are both called '%s': give one of "
                                 "them another name",
                                 call, k, i, b->name);
        to[i] = *b;
        memcpy(names + 80 * i, b->name, strlen(b->name) + 1);
        to[i].name = names + 80 * i;
    }
    return FSDP_OK;
}

static void fsdpi_ck_free_all(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_room *rooms[] = {
        &ck->blobs,      &ck->steps,  &ck->table.tensors, &ck->table.text, &ck->table.order,
        &ck->table.base, &s->entries, &s->names,          &s->header,      &s->spans,
        &s->numbers,     &s->sizes,   &s->crcs,           &s->manifest,    &s->stage};
    fsdp_model *m = ck->model;
    if (ck->stuck) { // a thread still looks at it, and ends when its file call comes back
        FSDPI_CK_PUT(&ck->worker.stop, 1);
        (void)pthread_detach(ck->worker.thread);
        return;
    }
    fsdpi_ck_stop(&ck->worker);
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) fsdpi_ck_free(m, rooms[i]);
    fsdp_free(m, FSDP_MEMORY_HOST, ck, (int64_t)sizeof *ck);
}
// The model ends, or fsdp_checkpoint_destroy: a save under way is given up.
static void fsdpi_ck_end_of_model(void *user) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)user;
    fsdpi_ck_watch watch = {0, 0};
    FSDPI_CK_PUT(&ck->save.given_up, 1);
    fsdpi_ck_ring(&ck->worker.to_worker);
    while (!ck->stuck && ck->worker.started && fsdpi_ck_is_busy(&ck->worker)) {
        fsdpi_ck_nap(&ck->worker, FSDPI_CK_NAP);
        fsdpi_ck_look(ck, &watch);
    }
    fsdpi_ck_free_all(ck);
}

static fsdp_status fsdpi_ck_init(fsdp_checkpoint *ck, fsdp_model *model,
                                 const fsdp_checkpoint_desc *desc) {
    static const char *const call = "checkpoint_create";
    const uint16_t one = 1;
    ck->model = model;
    ck->world = fsdp_model_world(model);
    ck->rank = fsdp_rank(ck->world);
    ck->size = fsdp_world_size(ck->world);
    fsdp_status status = fsdp_desc_read(ck->world, &ck->desc, desc, sizeof ck->desc,
                                        "fsdp_checkpoint_desc");
    if (status) return status;
    if (!*(const unsigned char *)&one)
        return fsdp_fail(ck->world, FSDP_ERR_UNSUPPORTED,
                         "[E444] %s: this host is big-endian and the files are little-endian",
                         call);
    if (ck->desc.keep < 0 || ck->desc.keep_every < 0 || ck->desc.stall_ms < 0 ||
        ck->desc.stage_bytes < 0 ||
        (ck->desc.files &&
         (ck->desc.files->version != 1 || ck->desc.files->size != sizeof(fsdp_file_ops))))
        return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E445] %s: keep, keep_every, stall_ms or stage_bytes is negative, or "
                         "files is not of version 1: zero the desc, then set what you need",
                         call);
    if (!ck->desc.stall_ms) ck->desc.stall_ms = 600000;
    fsdpi_ck_disk_init(&ck->disk, ck->desc.files, ck->desc.files_user);
    status = fsdpi_ck_copy_blobs(ck, call);
    if (!status && ck->rank == 0)
        status = fsdpi_ck_reserve(model, &ck->steps, FSDPI_CK_MOST_STEPS * (int64_t)sizeof(int64_t),
                                  0);
    ck->extension.name = "checkpoint";
    ck->extension.user = ck;
    ck->extension.destroy = fsdpi_ck_end_of_model;
    return status;
}

FSDP_API fsdp_status fsdp_checkpoint_create(fsdp_model *model, const fsdp_checkpoint_desc *desc,
                                            fsdp_checkpoint **out) {
    static const char *const call = "checkpoint_create";
    void *room = NULL;
    int attached = 0;
    if (!model || !out) return fsdpi_ck_null(fsdp_model_world(model), call, "model or ck");
    *out = NULL;
    fsdp_status mine = fsdp_alloc(model, FSDP_MEMORY_HOST, (int64_t)sizeof(fsdp_checkpoint),
                                  "checkpoint_create: no memory", &room);
    fsdp_checkpoint *ck = (fsdp_checkpoint *)room;
    fsdp_world *world = fsdp_model_world(model);
    if (!mine) mine = fsdpi_ck_init(ck, model, desc);
    fsdp_status status = fsdpi_ck_agree(world, call, mine); // a commit is for all ranks or none
    if (!status) {
        mine = fsdp_model_commit(model);
        if (!mine) mine = fsdpi_ck_tabulate(ck, call, 0);
        if (!mine) mine = fsdp_attach(model, &ck->extension);
        attached = !mine;
        status = fsdpi_ck_agree(world, call, mine);
    }
    if (!status) *out = ck;
    else if (attached) (void)fsdp_detach(model, &ck->extension);
    else if (ck) fsdpi_ck_free_all(ck);
    return status;
}

FSDP_API void fsdp_checkpoint_destroy(fsdp_checkpoint *ck) {
    if (ck) (void)fsdp_detach(ck->model, &ck->extension);
}

/* -------------------------------------------------------------------------------------------- */
// Saves.

static fsdp_status fsdpi_ck_finish(fsdp_checkpoint *ck, const char *call) {
    fsdp_status status = fsdp_world_status(ck->world);
    while (!status && ck->save.stage_of != FSDPI_CK_IDLE)
        status = fsdpi_ck_advance(ck, call, FSDPI_CK_NAP);
    return status;
}

// Up to the point where the worker writes and everything is copied.
static fsdp_status fsdpi_ck_begin_save(fsdp_checkpoint *ck, const char *call, const char *dir,
                                       int64_t step, int is_async) {
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_args args, first;
    uint64_t layout = 0;
    int32_t is_new;
    s->begin_ns = fsdpi_ck_now();
    memset(&args, 0, sizeof args);
    args.nonce = fsdpi_ck_nonce();
    args.step = step;
    snprintf(args.path, sizeof args.path, "%s", dir ? dir : "");
    first = args;
    fsdp_status status = fsdp_broadcast(ck->world, NULL, &first, sizeof first, 0);
    if (status) return status;
    status = fsdpi_ck_agree(ck->world, call,
                            fsdpi_ck_check_save(ck, call, &args, &first, is_async, &layout));
    if (status) return status;
    is_new = layout != s->layout;
    s->layout = 0;
    status = fsdp_all_reduce(ck->world, NULL, &is_new, 1, FSDP_I32, FSDP_MAX);
    if (!status && is_new) status = fsdpi_ck_new_layout(ck, call);
    if (status) return status;
    s->layout = layout;
    memset(s->crcs.ptr, 0, (size_t)(s->num_crcs * 4));
    if (ck->rank == 0) status = fsdpi_ck_run(ck, call, fsdpi_ck_make_dirs, ck);
    status = fsdpi_ck_follow(ck, call, status);
    if (status) return status;
    int any_failed, copies_first = s->stage_bytes && s->stage_bytes == s->data_bytes;
    // If there is room for everything, nobody writes while this rank copies.
    fsdp_status mine = copies_first ? fsdpi_ck_copy(ck) : FSDP_OK;
    if (!mine) mine = fsdpi_ck_hand(ck, call, fsdpi_ck_write_file, ck);
    if (!mine && !copies_first) mine = fsdpi_ck_copy(ck);
    if (!mine && ck->stuck) mine = fsdpi_ck_told(ck, call);
    status = fsdpi_ck_gather_in(ck, mine, &any_failed);
    if (status) return status;
    if (any_failed) return fsdpi_ck_give_up(ck, call, mine);
    s->stage_of = FSDPI_CK_WRITING;
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_save_call(fsdp_checkpoint *ck, const char *call, const char *dir,
                                      int64_t step, int is_async) {
    if (!ck) return fsdpi_ck_null(NULL, call, "ck");
    int64_t begin = fsdpi_ck_now();
    fsdp_status status = fsdpi_ck_finish(ck, call);
    if (!status) status = fsdpi_ck_begin_save(ck, call, dir, step, is_async);
    if (!status && !is_async) status = fsdpi_ck_finish(ck, call);
    if (!status) ck->report.blocked_ns = fsdpi_ck_now() - begin;
    return status;
}
FSDP_API fsdp_status fsdp_checkpoint_save(fsdp_checkpoint *ck, const char *dir, int64_t step) {
    return fsdpi_ck_save_call(ck, "checkpoint_save", dir, step, 0);
}
FSDP_API fsdp_status fsdp_checkpoint_save_async(fsdp_checkpoint *ck, const char *dir,
                                                int64_t step) {
    return fsdpi_ck_save_call(ck, "checkpoint_save_async", dir, step, 1);
}
FSDP_API fsdp_status fsdp_checkpoint_poll(fsdp_checkpoint *ck, int *busy) {
    if (!ck) return fsdpi_ck_null(NULL, "checkpoint_poll", "ck");
    fsdp_status status = fsdp_world_status(ck->world);
    if (!status && ck->save.stage_of != FSDPI_CK_IDLE)
        status = fsdpi_ck_advance(ck, "checkpoint_poll", 0);
    if (busy) *busy = ck->save.stage_of != FSDPI_CK_IDLE;
    return status;
}
FSDP_API fsdp_status fsdp_checkpoint_wait(fsdp_checkpoint *ck) {
    return ck ? fsdpi_ck_finish(ck, "checkpoint_wait")
              : fsdpi_ck_null(NULL, "checkpoint_wait", "ck");
}

/* -------------------------------------------------------------------------------------------- */
// Find and load.

static void fsdpi_ck_io_of(fsdp_checkpoint *ck, const char *call) {
    memset(&ck->io, 0, sizeof ck->io);
    ck->io.ck = ck;
    ck->io.model = ck->model;
    ck->io.world = ck->world;
    ck->io.disk = &ck->disk;
    ck->io.call = call;
}

static void fsdpi_ck_find_steps(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    (void)fsdpi_ck_list_steps(&ck->disk, ck->io.path, &ck->found);
    if (ck->disk.error == ENOENT) fsdpi_ck_forget(&ck->disk); // no run yet
}

// Is this one complete? Its manifest is right, and its files are there with their sizes.
static fsdp_status fsdpi_ck_look_at(fsdp_checkpoint *ck, const char *path, int *complete) {
    fsdpi_ck_opened o;
    fsdpi_ck_manifest m;
    char file[FSDP_CHECKPOINT_PATH];
    int there = 0;
    memset(&o, 0, sizeof o);
    *complete = 0;
    fsdp_status status = fsdpi_ck_fetch_text(&ck->io, &o.bulk, path, "manifest.json", &there);
    if (!status && there) {
        const char *text = NULL;
        int64_t at = 0, nbytes = fsdpi_ck_take(&o.bulk, &at, &text);
        status = fsdpi_ck_get_manifest(&ck->io, text, nbytes, &m, &o.told);
        *complete = !status;
        for (int64_t i = 0; i < m.num_files && !status && *complete; i++) {
            *complete = fsdpi_ck_join(file, path, m.files[i].name);
            if (*complete) status = fsdpi_ck_open_path(&ck->io, file);
            if (status || !*complete) break;
            *complete = !ck->io.open.error && ck->io.open.nbytes == m.files[i].bytes;
            if (!ck->io.open.error) status = fsdpi_ck_close_path(&ck->io, status);
        }
    }
    fsdpi_ck_opened_end(&ck->io, &o);
    // A broken checkpoint is passed over; a file system that fails, and no memory, are failures.
    return status == FSDP_ERR_CORRUPT || status == FSDP_ERR_UNSUPPORTED ? FSDP_OK : status;
}

static fsdp_status fsdpi_ck_find_here(fsdp_checkpoint *ck, const char *dir, int64_t max_step,
                                      char *path, int64_t *step) {
    char leaf[FSDPI_CK_LEAF];
    int complete = 0;
    ck->found.steps = (int64_t *)ck->steps.ptr;
    ck->found.below = max_step < 0 || max_step == INT64_MAX ? INT64_MAX : max_step + 1;
    snprintf(ck->io.path, sizeof ck->io.path, "%s", dir);
    fsdp_status status = fsdpi_ck_run(ck, ck->io.call, fsdpi_ck_find_steps, ck);
    for (int32_t i = 0; i < ck->found.num && !status && !complete; i++) {
        *step = ck->found.steps[i];
        fsdpi_ck_step_name(leaf, *step);
        if (fsdpi_ck_join(path, dir, leaf)) status = fsdpi_ck_look_at(ck, path, &complete);
    }
    if (!complete) *step = -1;
    return status;
}

FSDP_API fsdp_status fsdp_checkpoint_find(fsdp_checkpoint *ck, const char *dir, int64_t max_step,
                                          char *path, size_t cap, int64_t *step) {
    static const char *const call = "checkpoint_find";
    char found[FSDP_CHECKPOINT_PATH] = "", leaf[FSDPI_CK_LEAF];
    int64_t newest = -1;
    fsdp_status mine = FSDP_OK;
    if (!ck) return fsdpi_ck_null(NULL, call, "ck");
    fsdp_status status = fsdpi_ck_finish(ck, call);
    if (status) return status;
    if (ck->stuck) mine = fsdpi_ck_told(ck, call);
    else if (!dir || !path || !step || !cap)
        mine = fsdpi_ck_null(ck->world, call, "dir, path or step");
    else if (strlen(dir) + FSDPI_CK_LEAF > cap || strlen(dir) + FSDPI_CK_LEAF > sizeof found)
        mine = fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E446] %s: a path in dir does not fit: pass room for %llu bytes", call,
                         (unsigned long long)(strlen(dir) + FSDPI_CK_LEAF));
    status = fsdpi_ck_agree(ck->world, call, mine);
    if (status) return status;
    fsdpi_ck_io_of(ck, call);
    if (ck->rank == 0) mine = fsdpi_ck_find_here(ck, dir, max_step, found, &newest);
    status = fsdpi_ck_follow(ck, call, mine);
    if (!status) status = fsdp_broadcast(ck->world, NULL, &newest, 8, 0);
    path[0] = 0;
    *step = -1;
    if (status || newest < 0) return status;
    *step = newest;
    fsdpi_ck_step_name(leaf, newest);
    snprintf(path, cap, "%s/%s", dir, leaf);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *ck, const char *path,
                                          const fsdp_checkpoint_load_desc *desc) {
    static const char *const call = "checkpoint_load";
    fsdpi_ck_room room = {NULL, 0};
    fsdpi_ck_args args, first;
    int64_t begin = fsdpi_ck_now();
    if (!ck) return fsdpi_ck_null(NULL, call, "ck");
    fsdp_status status = fsdpi_ck_finish(ck, call);
    if (status) return status;
    fsdp_status mine = fsdpi_ck_reserve(ck->model, &room, (int64_t)sizeof(fsdpi_ck_load), 0);
    fsdpi_ck_load *l = (fsdpi_ck_load *)room.ptr;
    if (!mine) memset(l, 0, sizeof *l);
    if (!ck->stuck) fsdpi_ck_io_of(ck, call); // else a thread still looks at it
    if (!mine)
        mine = fsdp_desc_read(ck->world, &l->desc, desc, sizeof l->desc,
                              "fsdp_checkpoint_load_desc");
    if (!mine && (!path || !*path || strlen(path) >= FSDP_CHECKPOINT_PATH - 300))
        mine = fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E447] %s: path is empty or too long: pass a checkpoint's directory, or "
                         "a .safetensors file",
                         call);
    if (!mine)
        mine = ck->stuck ? fsdpi_ck_told(ck, call)
                         : fsdp_call_begin(ck->model, FSDP_CALL_LOAD, call);
    fsdpi_ck_load_args(l, path, &args);
    first = args;
    status = fsdp_broadcast(ck->world, NULL, &first, sizeof first, 0);
    if (!mine && !status) mine = fsdpi_ck_same_args(ck, call, &args, &first);
    if (!status) status = fsdpi_ck_agree(ck->world, call, mine);
    int began = !status; // only then may a worker that hangs look into the room
    if (began) {
        l->ck = ck;
        l->io = &ck->io;
        status = fsdpi_ck_load_all(l, path);
        if (!status) fsdpi_ck_report_load(l, begin);
        fsdpi_ck_opened_end(l->io, &l->opened);
        if (l->reader.io) fsdpi_ck_reader_end(&l->reader);
        fsdpi_ck_drop(l->io, &l->numbers);
        fsdpi_ck_drop(l->io, &l->flags);
    }
    if (!ck->stuck || !began) fsdpi_ck_free(ck->model, &room);
    return status;
}

FSDP_API fsdp_status fsdp_checkpoint_last_report(const fsdp_checkpoint *ck,
                                                 fsdp_checkpoint_report *out) {
    if (!ck || !out)
        return fsdpi_ck_null(ck ? ck->world : NULL, "checkpoint_last_report", "ck or out");
    *out = ck->report;
    return FSDP_OK;
}

FSDP_API int64_t fsdp_checkpoint_nbytes(fsdp_checkpoint *ck) {
    uint64_t layout;
    if (!ck || ck->stuck) return -1;
    if (ck->save.stage_of != FSDPI_CK_IDLE) return ck->save.stage_bytes;
    if (fsdpi_ck_prepare(ck, "checkpoint_nbytes", &layout)) return -1;
    return fsdpi_ck_stage_for(ck, 1);
}


/* ==== checkpoint/alone.h ====================================================================
   a checkpoint read by one process, without a world */

// Owns: the reader of tools and bindings. File calls happen in the calling thread, memory is the
// C library's, and failures go to the caller's text instead of a log.

// A tensor of all files: its boxes stand together.
typedef struct fsdpi_ck_whole_tensor {
    int64_t first, count;         // boxes
    int64_t shape[FSDP_MAX_DIMS]; // of the whole
} fsdpi_ck_whole_tensor;

struct fsdp_checkpoint_reader {
    fsdpi_ck_disk disk;
    fsdpi_ck_io io;
    fsdpi_ck_opened opened;
    fsdpi_ck_reader reader;
    fsdpi_ck_verify_job verify;
    fsdpi_ck_room tensors;
    int64_t num_tensors;
    char path[FSDP_CHECKPOINT_PATH];
};

static fsdpi_ck_whole_tensor *fsdpi_ck_whole_at(const fsdp_checkpoint_reader *r, int64_t index) {
    return (fsdpi_ck_whole_tensor *)r->tensors.ptr + index;
}
static const fsdp_safetensors_entry *fsdpi_ck_entry_of(const fsdp_checkpoint_reader *r,
                                                       int64_t index) {
    return r->opened.boxes[fsdpi_ck_whole_at(r, index)->first].entry;
}

// From here on failures of the reader go to this text. Without a reader there is only memory's.
static void fsdpi_ck_speak(fsdp_checkpoint_reader *r, const char *call, char *text, size_t cap) {
    r->io.call = call;
    r->io.text = text, r->io.cap = text ? cap : 0;
    if (text && cap) text[0] = 0;
}
static fsdp_status fsdpi_ck_no_memory(fsdp_status status, char *text, size_t cap) {
    if (status == FSDP_ERR_OUT_OF_MEMORY && text && cap && !text[0])
        snprintf(text, cap, "%s", fsdp_last_error(NULL));
    return status;
}
static fsdp_status fsdpi_ck_refused(const char *call, const char *what, char *text, size_t cap) {
    if (text && cap)
        snprintf(text, cap, "[E460] %s: %s is NULL, empty, or longer than %d bytes", call, what,
                 FSDP_CHECKPOINT_PATH - 300);
    return FSDP_ERR_INVALID_ARG;
}
static int fsdpi_ck_good_path(const char *path) {
    return path && *path && strlen(path) < FSDP_CHECKPOINT_PATH - 300;
}

// The tensors of all boxes, which are sorted by name.
static fsdp_status fsdpi_ck_list_tensors(fsdp_checkpoint_reader *r) {
    const fsdpi_ck_opened *o = &r->opened;
    fsdp_status status = fsdpi_ck_reserve(
        NULL, &r->tensors, (o->num_boxes + 1) * (int64_t)sizeof(fsdpi_ck_whole_tensor), 0);
    if (status) return status;
    for (int64_t i = 0, end; i < o->num_boxes; i = end) {
        const fsdp_safetensors_entry *e = o->boxes[i].entry;
        fsdpi_ck_whole_tensor *t = fsdpi_ck_whole_at(r, r->num_tensors++);
        for (end = i + 1; end < o->num_boxes; end++)
            if (strcmp(o->boxes[end].entry->name, e->name) != 0) break;
        memset(t, 0, sizeof *t);
        t->first = i, t->count = end - i;
        if (e->ndim <= FSDP_MAX_DIMS) fsdpi_ck_whole(o->boxes + i, (int)t->count, t->shape);
        else memcpy(t->shape, e->shape, sizeof t->shape);
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_open_alone(const char *call, const char *path,
                                       const fsdp_file_ops *files, void *files_user,
                                       fsdp_checkpoint_reader **out, char *text, size_t cap) {
    void *room = NULL;
    *out = NULL;
    if (text && cap) text[0] = 0;
    if (!fsdpi_ck_good_path(path)) return fsdpi_ck_refused(call, "path", text, cap);
    fsdp_status status = fsdpi_ck_alloc(NULL, (int64_t)sizeof **out, &room);
    if (status) return fsdpi_ck_no_memory(status, text, cap);
    fsdp_checkpoint_reader *r = (fsdp_checkpoint_reader *)room;
    fsdpi_ck_disk_init(&r->disk, files, files_user);
    r->io.disk = &r->disk;
    fsdpi_ck_speak(r, call, text, cap);
    snprintf(r->path, sizeof r->path, "%s", path);
    r->opened.dir = r->path;
    status = fsdpi_ck_fetch(&r->io, path, &r->opened.bulk);
    if (!status) status = fsdpi_ck_understand(&r->io, &r->opened);
    if (!status) status = fsdpi_ck_list_tensors(r);
    if (!status) status = fsdpi_ck_reader_init(&r->reader, &r->io, &r->opened, 1);
    if (!status) *out = r;
    else fsdp_checkpoint_close(r);
    return fsdpi_ck_no_memory(status, text, cap);
}

FSDP_API fsdp_status fsdp_checkpoint_open(const char *path, const fsdp_file_ops *files,
                                          void *files_user, fsdp_checkpoint_reader **reader,
                                          char *text, size_t cap) {
    static const char *const call = "checkpoint_open";
    if (!reader) return fsdpi_ck_refused(call, "reader", text, cap);
    return fsdpi_ck_open_alone(call, path, files, files_user, reader, text, cap);
}

FSDP_API void fsdp_checkpoint_close(fsdp_checkpoint_reader *r) {
    fsdpi_ck_room self = {r, 0};
    if (!r) return;
    fsdpi_ck_opened_end(&r->io, &r->opened);
    if (r->reader.io) fsdpi_ck_reader_end(&r->reader);
    fsdpi_ck_free(NULL, &r->tensors);
    fsdpi_ck_free(NULL, &self);
}

FSDP_API fsdp_status fsdp_checkpoint_contents_of(const fsdp_checkpoint_reader *r,
                                                 fsdp_checkpoint_contents *out) {
    if (!r || !out) return FSDP_ERR_INVALID_ARG;
    memset(out, 0, sizeof *out);
    out->step = r->opened.step;
    out->world = r->opened.world;
    out->num_files = r->opened.num_parts;
    out->num_tensors = r->num_tensors;
    out->num_boxes = r->opened.num_boxes;
    out->data_bytes = r->opened.total_bytes;
    out->has_checksums = r->opened.step >= 0;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_checkpoint_tensor_at(const fsdp_checkpoint_reader *r, int64_t index,
                                               fsdp_checkpoint_tensor *out) {
    if (!r || !out || index < 0 || index >= r->num_tensors) return FSDP_ERR_INVALID_ARG;
    const fsdpi_ck_whole_tensor *t = fsdpi_ck_whole_at(r, index);
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(r, index), *before = NULL;
    memset(out, 0, sizeof *out);
    out->name = e->name;
    out->dtype = e->ndim <= FSDP_MAX_DIMS ? e->dtype : FSDP_SAFETENSORS_OTHER;
    out->file_dtype = e->file_dtype;
    out->ndim = e->ndim;
    memcpy(out->shape, t->shape, sizeof out->shape);
    for (int64_t i = t->first; i < t->first + t->count; before = e, i++) {
        e = r->opened.boxes[i].entry;
        if (before && e->ndim <= FSDP_MAX_DIMS && fsdpi_ck_same_box(before, e)) continue;
        out->nbytes += e->end - e->begin;
        out->num_boxes++;
    }
    return FSDP_OK;
}

// The library has the dtype of a tensor, and as many dims.
static fsdp_status fsdpi_ck_readable(fsdp_checkpoint_reader *r, int64_t index) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(r, index);
    if (e->ndim <= FSDP_MAX_DIMS && e->dtype != FSDP_SAFETENSORS_OTHER) return FSDP_OK;
    return fsdpi_ck_fail(&r->io, FSDP_ERR_UNSUPPORTED,
                         "[E461] %s: '%.300s' is %s with %d dims, which the library does not have: "
                         "leave it out",
                         r->io.call, e->name, fsdp_safetensors_dtype_name(e->file_dtype), e->ndim);
}
// May elements of dtype `from` be had as `to`?
static int fsdpi_ck_converts(fsdp_dtype from, fsdp_dtype to) {
    return from == to || (fsdp_dtype_is_float(from) && fsdp_dtype_is_float(to));
}

// A box of a tensor is wanted in memory; the caller has checked it.
static fsdp_status fsdpi_ck_want_box(fsdp_checkpoint_reader *r, int64_t index, const int64_t *start,
                                     const int64_t *shape, fsdp_dtype dtype, char *to) {
    const fsdpi_ck_whole_tensor *t = fsdpi_ck_whole_at(r, index);
    fsdpi_ck_want w;
    memset(&w, 0, sizeof w);
    w.to = to;
    w.dtype = dtype;
    w.memory = FSDP_MEMORY_HOST;
    w.ndim = fsdpi_ck_entry_of(r, index)->ndim;
    for (int d = 0; d < w.ndim; d++) w.start[d] = start[d], w.shape[d] = shape[d];
    if (!fsdpi_ck_volume(w.ndim, w.shape)) return FSDP_OK;
    return fsdpi_ck_add_want(&r->reader, &w, t->first, t->count);
}

FSDP_API fsdp_status fsdp_checkpoint_read(fsdp_checkpoint_reader *r, int64_t index,
                                          const int64_t *start, const int64_t *shape,
                                          fsdp_dtype dtype, void *to, char *text, size_t cap) {
    static const char *const call = "checkpoint_read";
    static const int64_t zero[FSDP_MAX_DIMS] = {0};
    if (!r || !to) return fsdpi_ck_refused(call, "reader or to", text, cap);
    fsdpi_ck_speak(r, call, text, cap);
    int inside = index >= 0 && index < r->num_tensors;
    fsdp_status status = inside ? fsdpi_ck_readable(r, index) : FSDP_OK;
    if (status) return status;
    const fsdp_safetensors_entry *e = inside ? fsdpi_ck_entry_of(r, index) : NULL;
    const int64_t *whole = inside ? fsdpi_ck_whole_at(r, index)->shape : NULL;
    if (e && dtype == FSDP_DTYPE_KEEP) dtype = e->dtype;
    if (!start && !shape) start = zero, shape = whole;
    inside = inside && start && shape && fsdpi_ck_converts(e->dtype, dtype);
    for (int d = 0; inside && d < e->ndim; d++)
        inside = start[d] >= 0 && shape[d] >= 0 && start[d] <= whole[d] &&
                 shape[d] <= whole[d] - start[d];
    if (!inside)
        return fsdpi_ck_fail(&r->io, FSDP_ERR_INVALID_ARG,
                             "[E462] %s: tensor %lld of %lld: expected an index below their "
                             "number, a box inside of the tensor, and KEEP or a floating dtype for "
                             "a floating one",
                             call, (long long)index, (long long)r->num_tensors);
    status = fsdpi_ck_want_box(r, index, start, shape, dtype, (char *)to);
    if (!status) status = fsdpi_ck_read_all(&r->reader);
    return fsdpi_ck_no_memory(status, text, cap);
}

FSDP_API fsdp_status fsdp_checkpoint_verify(const char *path, const fsdp_file_ops *files,
                                            void *files_user, char *text, size_t cap) {
    fsdp_checkpoint_reader *r;
    fsdp_status status = fsdpi_ck_open_alone("checkpoint_verify", path, files, files_user, &r, text,
                                             cap);
    if (status) return status;
    r->verify.r = &r->reader;
    r->verify.mine = 0, r->verify.of = 1;
    status = fsdpi_ck_do(&r->io, fsdpi_ck_verify_blocks, &r->verify);
    if (!status && text && cap && r->opened.step >= 0)
        snprintf(text, cap, "step %lld: %lld tensors in %lld files, %lld checksums of %lld bytes",
                 (long long)r->opened.step, (long long)r->num_tensors,
                 (long long)r->opened.num_parts, (long long)r->verify.num_blocks,
                 (long long)r->opened.total_bytes);
    else if (!status && text && cap)
        snprintf(text, cap,
                 "%lld tensors in %lld files, %lld bytes that have no checksums: only headers were "
                 "checked",
                 (long long)r->num_tensors, (long long)r->opened.num_parts,
                 (long long)r->opened.total_bytes);
    fsdp_checkpoint_close(r);
    return status;
}


/* ==== checkpoint/export.h ===================================================================
   whole tensors to a new directory, in the form of Hugging Face or in ours */

// Owns: which tensor goes to which file, and the way to one rename. Files are written one after
// another, from their first byte to the last, in pieces. Each piece is some boxes that are read
// into one buffer.

// A tensor as it is called there.
typedef struct fsdpi_ck_out {
    const char *name;
    int64_t tensor; // in the reader
    int64_t nbytes; // there
    fsdp_dtype dtype;
    int32_t file;
} fsdpi_ck_out;

typedef struct fsdpi_ck_export {
    fsdp_checkpoint_reader *in;
    fsdp_checkpoint_export_desc desc;
    const char *call;
    fsdpi_ck_room outs, names, entries, header, data, sizes, crcs, text;
    int64_t num_outs, num_crcs, total_bytes, step;
    int32_t num_files;
    int sharded; // 1: boxes, a manifest
    void *file;  // that is written
    char out[FSDP_CHECKPOINT_PATH], parent[FSDP_CHECKPOINT_PATH], tmp[FSDP_CHECKPOINT_PATH];
    char path[FSDP_CHECKPOINT_PATH]; // of the file
} fsdpi_ck_export;

static fsdpi_ck_out *fsdpi_ck_out_at(const fsdpi_ck_export *x, int64_t index) {
    return (fsdpi_ck_out *)x->outs.ptr + index;
}
static int fsdpi_ck_by_out(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_out *)a)->name, ((const fsdpi_ck_out *)b)->name);
}

/* -------------------------------------------------------------------------------------------- */
// The plan.

// Names that are not parameters'.
static int fsdpi_ck_is_state(const char *name) {
    return strncmp(name, "optim.", 6) == 0 || strncmp(name, "fsdp.", 5) == 0;
}

// One tensor of the source: its name there; NULL: it is left out.
static fsdp_status fsdpi_ck_add_out(fsdpi_ck_export *x, int64_t index) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(x->in, index);
    char *renamed = (char *)x->names.ptr + x->num_outs * FSDP_CHECKPOINT_NAME;
    const int state = fsdpi_ck_is_state(e->name);
    if (state && !x->desc.with_optimizer && !x->sharded) return FSDP_OK;
    if (x->desc.rename) {
        renamed[0] = 0;
        if (!x->desc.rename(x->desc.user, e->name, renamed)) return FSDP_OK;
        renamed[FSDP_CHECKPOINT_NAME - 1] = 0;
    }
    fsdp_status status = fsdpi_ck_readable(x->in, index);
    if (status) return status;
    fsdpi_ck_out *o = fsdpi_ck_out_at(x, x->num_outs++);
    o->name = x->desc.rename ? renamed : e->name;
    o->tensor = index;
    o->dtype = x->desc.dtype != FSDP_DTYPE_KEEP && !state && fsdp_dtype_is_float(e->dtype)
                   ? x->desc.dtype
                   : e->dtype;
    o->nbytes = fsdpi_ck_volume(e->ndim, fsdpi_ck_whole_at(x->in, index)->shape) *
                (int64_t)fsdp_dtype_size(o->dtype);
    o->file = 0;
    x->total_bytes += o->nbytes;
    return FSDP_OK;
}

// Which file, by the rule of huggingface_hub: in the order of names; a tensor above the limit has a
// file of its own, and the one that is being filled goes on behind it.
static void fsdpi_ck_split(fsdpi_ck_export *x) {
    const int64_t most = x->desc.max_file_bytes ? x->desc.max_file_bytes : INT64_C(5000000000);
    int64_t filled = 0, first = 0; // of the file that is being filled
    int32_t done = 0;              // files that are complete
    int open = 0;
    for (int64_t i = 0; i < x->num_outs; i++) {
        fsdpi_ck_out *o = fsdpi_ck_out_at(x, i);
        if (o->nbytes > most) {
            o->file = done++;
            continue;
        }
        if (open && filled + o->nbytes > most) {
            for (int64_t k = first; k < i; k++)
                if (fsdpi_ck_out_at(x, k)->file < 0) fsdpi_ck_out_at(x, k)->file = done;
            done++, open = 0;
        }
        if (!open) first = i, filled = 0, open = 1;
        o->file = -1; // its number is known when it is complete
        filled += o->nbytes;
    }
    for (int64_t k = first; k < x->num_outs; k++)
        if (fsdpi_ck_out_at(x, k)->file < 0) fsdpi_ck_out_at(x, k)->file = done;
    x->num_files = done + open;
}

static fsdp_status fsdpi_ck_plan_export(fsdpi_ck_export *x) {
    fsdpi_ck_io *io = &x->in->io;
    const int64_t num = x->in->num_tensors + 1;
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->outs, num * (int64_t)sizeof(fsdpi_ck_out), 0);
    if (!status && x->desc.rename)
        status = fsdpi_ck_reserve(NULL, &x->names, num * FSDP_CHECKPOINT_NAME, 0);
    if (!status)
        status = fsdpi_ck_reserve(NULL, &x->entries, num * (int64_t)sizeof(fsdp_safetensors_entry),
                                  0);
    for (int64_t i = 0; i < x->in->num_tensors && !status; i++) status = fsdpi_ck_add_out(x, i);
    if (status) return status;
    if (!x->num_outs)
        return fsdpi_ck_fail(io, FSDP_ERR_INVALID_ARG,
                             "[E467] %s: of %lld tensors in %s none is to be written", x->call,
                             (long long)x->in->num_tensors, x->in->path);
    qsort(x->outs.ptr, (size_t)x->num_outs, sizeof(fsdpi_ck_out), fsdpi_ck_by_out);
    for (int64_t i = 1; i < x->num_outs; i++)
        if (!fsdpi_ck_by_out(fsdpi_ck_out_at(x, i - 1), fsdpi_ck_out_at(x, i)))
            return fsdpi_ck_fail(io, FSDP_ERR_INVALID_ARG,
                                 "[E465] %s: two tensors become '%.300s': let rename give one of "
                                 "them another name",
                                 x->call, fsdpi_ck_out_at(x, i)->name);
    if (!x->sharded) fsdpi_ck_split(x);
    else x->num_files = x->desc.num_ranks;
    return fsdpi_ck_reserve(NULL, &x->sizes, 3 * (int64_t)x->num_files * (int64_t)sizeof(int64_t),
                            0);
}

// The rows of a tensor that file `file` has; as a save of so many ranks cuts what all of them hold.
static int64_t fsdpi_ck_file_rows(const fsdpi_ck_export *x, int64_t index, int file,
                                  int64_t *first) {
    const fsdpi_ck_out *o = fsdpi_ck_out_at(x, index);
    const int64_t rows = fsdpi_ck_entry_of(x->in, o->tensor)->ndim
                             ? fsdpi_ck_whole_at(x->in, o->tensor)->shape[0]
                             : 1;
    fsdp_range mine = FSDP_ZERO;
    *first = 0;
    if (!x->sharded) return o->file == file ? rows : -1;
    if (rows < x->num_files || o->nbytes < 65536 * (int64_t)x->num_files)
        return index % x->num_files == file ? rows : -1;
    (void)fsdp_shard_range(rows, x->num_files, file, &mine);
    *first = mine.start;
    return mine.count ? mine.count : -1;
}

// The entries of a file, not sorted yet. Returns their number.
static int64_t fsdpi_ck_file_entries(const fsdpi_ck_export *x, int file) {
    int64_t num = 0, first;
    for (int64_t i = 0; i < x->num_outs; i++) {
        const fsdpi_ck_out *o = fsdpi_ck_out_at(x, i);
        int64_t rows = fsdpi_ck_file_rows(x, i, file, &first);
        if (rows < 0) continue;
        fsdp_safetensors_entry *e = (fsdp_safetensors_entry *)x->entries.ptr + num++;
        memset(e, 0, sizeof *e);
        e->name = o->name;
        e->dtype = o->dtype;
        e->ndim = fsdpi_ck_entry_of(x->in, o->tensor)->ndim;
        memcpy(e->whole, fsdpi_ck_whole_at(x->in, o->tensor)->shape, sizeof e->whole);
        memcpy(e->shape, e->whole, sizeof e->shape);
        if (e->ndim) e->start[0] = first, e->shape[0] = rows;
    }
    return num;
}

/* -------------------------------------------------------------------------------------------- */
// Files.

static void fsdpi_ck_file_name(const fsdpi_ck_export *x, int file, char out[FSDPI_CK_LEAF]) {
    if (x->sharded) fsdpi_ck_shard_name(out, file);
    else if (x->num_files == 1) snprintf(out, FSDPI_CK_LEAF, "model.safetensors");
    else
        snprintf(out, FSDPI_CK_LEAF, "model-%05d-of-%05d.safetensors", file + 1, (int)x->num_files);
}

static fsdp_status fsdpi_ck_create_file(fsdpi_ck_export *x, const char *leaf) {
    int64_t ignored;
    fsdpi_ck_forget(&x->in->disk);
    (void)fsdpi_ck_join(x->path, x->tmp, leaf); // `out` is short enough
    (void)fsdpi_ck_open(&x->in->disk, x->path, 1, &x->file, &ignored);
    return fsdpi_ck_told_alone(&x->in->io);
}
static fsdp_status fsdpi_ck_write_bytes(fsdpi_ck_export *x, const void *from, int64_t nbytes,
                                        int64_t at) {
    fsdpi_ck_forget(&x->in->disk);
    (void)fsdpi_ck_write(&x->in->disk, x->file, x->path, from, nbytes, at);
    return fsdpi_ck_told_alone(&x->in->io);
}
// Also after a failure, whose status this returns then.
static fsdp_status fsdpi_ck_finish_file(fsdpi_ck_export *x, fsdp_status status) {
    fsdpi_ck_forget(&x->in->disk);
    if (!status) (void)fsdpi_ck_sync(&x->in->disk, x->file, x->path);
    (void)fsdpi_ck_close(&x->in->disk, x->file, x->path);
    x->file = NULL;
    return status ? status : fsdpi_ck_told_alone(&x->in->io);
}
static fsdp_status fsdpi_ck_write_text(fsdpi_ck_export *x, const char *leaf, int64_t nbytes) {
    fsdp_status status = fsdpi_ck_create_file(x, leaf);
    if (status) return status;
    return fsdpi_ck_finish_file(x, fsdpi_ck_write_bytes(x, x->text.ptr, nbytes, 0));
}

/* The largest box of at most `most` elements that begins with element `at` of a tensor and lies
   together in it. Returns its elements. */
static int64_t fsdpi_ck_next_box(int ndim, const int64_t *shape, int64_t at, int64_t most,
                                 int64_t *start, int64_t *size) {
    int64_t inner = fsdpi_ck_volume(ndim, shape), rest = at, n = 1;
    int cut = -1;
    for (int d = 0; d < ndim; d++) {
        inner /= shape[d];
        start[d] = rest / inner;
        rest %= inner;
        size[d] = cut < 0 ? 1 : shape[d];
        if (cut >= 0 || rest || inner > most) continue;
        cut = d;
        size[d] = fsdpi_ck_less(most / inner, shape[d] - start[d]);
        n = size[d] * inner;
    }
    return n;
}

static const fsdpi_ck_out *fsdpi_ck_out_of(const fsdpi_ck_export *x, const char *name) {
    fsdpi_ck_out key;
    memset(&key, 0, sizeof key);
    key.name = name;
    return (const fsdpi_ck_out *)bsearch(&key, x->outs.ptr, (size_t)x->num_outs, sizeof key,
                                         fsdpi_ck_by_out);
}

// The next piece of a file's data, from element *at of entry *next on. Returns its bytes in *used.
static fsdp_status fsdpi_ck_read_piece(fsdpi_ck_export *x, int64_t num, int64_t *next, int64_t *at,
                                       int64_t *used) {
    fsdp_status status = FSDP_OK;
    for (*used = 0; *next < num && !status;) {
        const fsdp_safetensors_entry *e = (const fsdp_safetensors_entry *)x->entries.ptr + *next;
        const int64_t size = (int64_t)fsdp_dtype_size(e->dtype);
        int64_t start[FSDP_MAX_DIMS], shape[FSDP_MAX_DIMS], room = (FSDPI_CK_PIECE - *used) / size;
        if (*at == fsdpi_ck_volume(e->ndim, e->shape)) {
            (*next)++, *at = 0;
            continue;
        }
        if (!room) break;
        int64_t n = fsdpi_ck_next_box(e->ndim, e->shape, *at, room, start, shape);
        for (int d = 0; d < e->ndim; d++) start[d] += e->start[d];
        status = fsdpi_ck_want_box(x->in, fsdpi_ck_out_of(x, e->name)->tensor, start, shape,
                                   e->dtype, (char *)x->data.ptr + *used);
        *at += n;
        *used += n * size;
    }
    return status ? status : fsdpi_ck_read_all(&x->in->reader);
}

// The header of a file, and its sizes.
static fsdp_status fsdpi_ck_print_file(fsdpi_ck_export *x, int file, int64_t num) {
    fsdp_safetensors_entry *entries = (fsdp_safetensors_entry *)x->entries.ptr;
    int64_t *sizes = (int64_t *)x->sizes.ptr + 3 * (int64_t)file;
    int64_t n = fsdpi_ck_print_begin(entries, num, x->sharded, file, (int)x->num_files, NULL, 0);
    if (n < 0)
        return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                             "[E466] %s: the header of %lld tensors cannot be written: a name is "
                             "empty, not UTF-8 or '__metadata__', or the header has more than "
                             "100,000,000 bytes",
                             x->call, (long long)num);
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->header, n, 0);
    if (status) return status;
    (void)fsdpi_ck_print_begin(entries, num, x->sharded, file, (int)x->num_files,
                               (char *)x->header.ptr, n);
    sizes[0] = n;
    sizes[1] = entries[num - 1].end;
    sizes[2] = (int64_t)fsdp_crc32c(0, x->header.ptr, n);
    int64_t crcs = x->num_crcs + fsdpi_ck_blocks(sizes[1]) + 1;
    status = fsdpi_ck_reserve(NULL, &x->crcs, 4 * crcs, 4 * x->num_crcs);
    if (!status) memset((uint32_t *)x->crcs.ptr + x->num_crcs, 0, 4 * (size_t)(crcs - x->num_crcs));
    return status;
}

static fsdp_status fsdpi_ck_write_one(fsdpi_ck_export *x, int file) {
    char leaf[FSDPI_CK_LEAF];
    int64_t *sizes = (int64_t *)x->sizes.ptr + 3 * (int64_t)file;
    int64_t num = fsdpi_ck_file_entries(x, file), next = 0, at = 0, n = 0;
    memset(sizes, 0, 3 * sizeof *sizes);
    if (!num) return FSDP_OK; // more ranks than tensors
    fsdp_status status = fsdpi_ck_print_file(x, file, num);
    if (status) return status;
    fsdpi_ck_file_name(x, file, leaf);
    status = fsdpi_ck_create_file(x, leaf);
    if (status) return status;
    status = fsdpi_ck_write_bytes(x, x->header.ptr, sizes[0], 0);
    for (int64_t done = 0; done < sizes[1] && !status; done += n) {
        status = fsdpi_ck_read_piece(x, num, &next, &at, &n);
        if (status) break;
        fsdpi_ck_sum((uint32_t *)x->crcs.ptr + x->num_crcs, done, (const char *)x->data.ptr, n);
        status = fsdpi_ck_write_bytes(x, x->data.ptr, n, sizes[0] + done);
    }
    x->num_crcs += fsdpi_ck_blocks(sizes[1]);
    return fsdpi_ck_finish_file(x, status);
}

/* -------------------------------------------------------------------------------------------- */
// Manifest or index.

// A string as Python's json prints it: in ASCII. Returns its bytes; `to` has room for them or is
// NULL.
static int64_t fsdpi_ck_put_ascii(char *to, const char *s) {
    char one[16];
    int64_t used = 0;
    for (int size; *s; s += size) {
        const unsigned char *u = (const unsigned char *)s;
        size = fsdpi_st_character(u, (int64_t)strlen(s));
        uint32_t c = size == 2   ? (u[0] & 31u) << 6 | (u[1] & 63u)
                     : size == 3 ? (u[0] & 15u) << 12 | (u[1] & 63u) << 6 | (u[2] & 63u)
                     : size == 4
                         ? (u[0] & 7u) << 18 | (u[1] & 63u) << 12 | (u[2] & 63u) << 6 | (u[3] & 63u)
                         : 0;
        int n = fsdpi_st_escape(*s, one);
        if (size < 1) size = 1; // names were checked: this does not happen
        if (*u == 127) c = 127;
        if (c >= 0x10000)
            n = snprintf(one, sizeof one, "\\u%04x\\u%04x", 0xD800u + ((c - 0x10000) >> 10),
                         0xDC00u + ((c - 0x10000) & 1023));
        else if (c) n = snprintf(one, sizeof one, "\\u%04x", c);
        if (to) memcpy(to + used, one, (size_t)n);
        used += n;
    }
    return used;
}

// model.safetensors.index.json, as huggingface_hub and transformers print it, names sorted.
static fsdp_status fsdpi_ck_write_index(fsdpi_ck_export *x) {
    int64_t most = 256;
    for (int64_t i = 0; i < x->num_outs; i++)
        most += fsdpi_ck_put_ascii(NULL, fsdpi_ck_out_at(x, i)->name) + FSDPI_CK_LEAF + 16;
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->text, most, 0);
    if (status) return status;
    fsdpi_ck_print p = {(char *)x->text.ptr, 0};
    fsdpi_ck_say(&p, "{\n  \"metadata\": {\n    \"total_size\": %lld\n  },\n  \"weight_map\": {\n",
                 (long long)x->total_bytes);
    for (int64_t i = 0; i < x->num_outs; i++) {
        const fsdpi_ck_out *o = fsdpi_ck_out_at(x, i);
        char leaf[FSDPI_CK_LEAF];
        fsdpi_ck_file_name(x, o->file, leaf);
        fsdpi_ck_say(&p, "    \"");
        p.used += fsdpi_ck_put_ascii(p.buf + p.used, o->name);
        fsdpi_ck_say(&p, "\": \"%s\"%s\n", leaf, i + 1 < x->num_outs ? "," : "");
    }
    fsdpi_ck_say(&p, "  }\n}");
    return fsdpi_ck_write_text(x, "model.safetensors.index.json", p.used);
}
static fsdp_status fsdpi_ck_write_manifest(fsdpi_ck_export *x) {
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->text,
                                          fsdpi_ck_manifest_room(x->num_files, x->num_crcs), 0);
    if (status) return status;
    int64_t n = fsdpi_ck_print_manifest((char *)x->text.ptr, x->step, x->in->opened.world,
                                        x->num_files, (const int64_t *)x->sizes.ptr,
                                        (const uint32_t *)x->crcs.ptr);
    return fsdpi_ck_write_text(x, "manifest.json", n);
}

/* -------------------------------------------------------------------------------------------- */
// Directories.

// OUT without slashes at its end, its parent, and a name beside it.
static fsdp_status fsdpi_ck_export_paths(fsdpi_ck_export *x, const char *out) {
    char leaf[FSDPI_CK_LEAF];
    snprintf(x->out, sizeof x->out, "%s", out);
    for (size_t n = strlen(x->out); n > 1 && x->out[n - 1] == '/'; n--) x->out[n - 1] = 0;
    const char *last = fsdpi_ck_last_part(x->out);
    size_t before = (size_t)(last - x->out);
    snprintf(x->parent, sizeof x->parent, "%.*s", before > 1 ? (int)before - 1 : (int)before,
             before ? x->out : ".");
    if (!before) snprintf(x->parent, sizeof x->parent, ".");
    snprintf(leaf, sizeof leaf, ".tmp-export-%016llx", (unsigned long long)fsdpi_ck_nonce());
    (void)fsdpi_ck_join(x->tmp, x->parent, leaf);
    int64_t step = fsdpi_ck_step_of(last);
    x->step = step >= 0 ? step : x->in->opened.step >= 0 ? x->in->opened.step : 0;
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_make_export(fsdpi_ck_export *x) {
    fsdpi_ck_disk *d = &x->in->disk;
    fsdpi_ck_forget(d);
    (void)fsdpi_ck_begin(d, "list", x->out);
    int error = d->ops->list(d->user, x->out, fsdpi_ck_stop_at_once, NULL);
    if (!error || error == ENOTDIR)
        return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                             "[E464] %s: %s is there already: choose another name", x->call,
                             x->out);
    if (error != ENOENT) (void)fsdpi_ck_end(d, error, x->out);
    if (!fsdpi_ck_begin(d, "mkdir", x->tmp))
        (void)fsdpi_ck_end(d, d->ops->make_dir(d->user, x->tmp), x->tmp);
    return fsdpi_ck_told_alone(&x->in->io);
}

static fsdp_status fsdpi_ck_publish(fsdpi_ck_export *x) {
    fsdpi_ck_disk *d = &x->in->disk;
    fsdpi_ck_forget(d);
    (void)fsdpi_ck_sync_dir(d, x->tmp);
    (void)fsdpi_ck_rename(d, x->tmp, x->out);
    (void)fsdpi_ck_sync_dir(d, x->parent);
    return fsdpi_ck_told_alone(&x->in->io);
}

static fsdp_status fsdpi_ck_export_all(fsdpi_ck_export *x, const char *out) {
    fsdp_status status = fsdpi_ck_export_paths(x, out);
    if (!status) status = fsdpi_ck_plan_export(x);
    if (!status) status = fsdpi_ck_reserve(NULL, &x->data, FSDPI_CK_PIECE, 0);
    if (!status) status = fsdpi_ck_make_export(x);
    if (status) return status;
    for (int32_t i = 0; i < x->num_files && !status; i++) status = fsdpi_ck_write_one(x, i);
    if (!status && x->sharded) status = fsdpi_ck_write_manifest(x);
    else if (!status && x->num_files > 1) status = fsdpi_ck_write_index(x);
    if (!status) status = fsdpi_ck_publish(x);
    if (status) (void)fsdpi_ck_remove_dir(&x->in->disk, x->tmp); // nothing is there behind a rename
    return status;
}

static fsdp_status fsdpi_ck_check_export(const fsdp_checkpoint_export_desc *desc,
                                         fsdp_checkpoint_export_desc *own, const char *call,
                                         const char *out, char *text, size_t cap) {
    fsdp_status status = fsdp_desc_read(NULL, own, desc, sizeof *own,
                                        "fsdp_checkpoint_export_desc");
    if (status && text && cap) snprintf(text, cap, "%s", fsdp_last_error(NULL));
    if (status) return status;
    if (!fsdpi_ck_good_path(out)) return fsdpi_ck_refused(call, "out", text, cap);
    int good = own->num_ranks >= 0 && own->num_ranks <= FSDPI_CK_MOST_FILES &&
               own->max_file_bytes >= 0 &&
               (own->dtype == FSDP_DTYPE_KEEP || fsdp_dtype_is_float(own->dtype)) &&
               (!own->files ||
                (own->files->version == 1 && own->files->size == sizeof(fsdp_file_ops)));
    if (!good && text && cap)
        snprintf(text, cap,
                 "[E463] %s: expected num_ranks 0 to %d, max_file_bytes >= 0, dtype KEEP or a "
                 "floating one, and files of version 1: zero the desc, then set what you need",
                 call, FSDPI_CK_MOST_FILES);
    return good ? FSDP_OK : FSDP_ERR_INVALID_ARG;
}

FSDP_API fsdp_status fsdp_checkpoint_export(const char *path, const char *out,
                                            const fsdp_checkpoint_export_desc *desc, char *text,
                                            size_t cap) {
    static const char *const call = "checkpoint_export";
    fsdp_checkpoint_export_desc own;
    void *room = NULL;
    if (text && cap) text[0] = 0;
    fsdp_status status = fsdpi_ck_check_export(desc, &own, call, out, text, cap);
    if (!status) status = fsdpi_ck_alloc(NULL, (int64_t)sizeof(fsdpi_ck_export), &room);
    if (status) return fsdpi_ck_no_memory(status, text, cap);
    fsdpi_ck_export *x = (fsdpi_ck_export *)room;
    x->desc = own;
    x->call = call;
    x->sharded = own.num_ranks > 0;
    status = fsdpi_ck_open_alone(call, path, own.files, own.files_user, &x->in, text, cap);
    if (!status) status = fsdpi_ck_no_memory(fsdpi_ck_export_all(x, out), text, cap);
    fsdpi_ck_room *rooms[] = {&x->outs, &x->names, &x->entries, &x->header,
                              &x->data, &x->sizes, &x->crcs,    &x->text};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) fsdpi_ck_free(NULL, rooms[i]);
    fsdp_checkpoint_close(x->in);
    free(room);
    return status;
}


#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION
