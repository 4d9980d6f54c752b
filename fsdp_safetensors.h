/* fsdp_safetensors.h - the safetensors format: headers read and written, checksums, and what two
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

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h)

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
   entries     [num] in: name, dtype, ndim, shape, with OTHER file_dtype, and with sharded 1 start
               and whole (all 0 while a box begins or ends elsewhere: not told). Out: in the order
               of the file, I64 F64 F32 I32 BF16 F16 I16 I8 U8 (others between them), then names by
               bytes; begin, end and file_dtype are set
   sharded     1: with DCP_SHARDING_INFO
   keys, values  [num_pairs] of the metadata, keys in ascending order of bytes
   buf         [cap], or NULL to measure. If it is too small, its content is undefined
   Result      bytes of the header. -1: a name that is there twice, is "__metadata__", has no byte
               or more than 4,096; a text that is not UTF-8; a dtype that is none; half a byte at
               the end; a shape, start or whole that is not possible; keys that do not ascend, or
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
        const int zip = memcmp(first, "PK\3\4", 4) == 0, pickle = memcmp(first, "\x80\2", 2) == 0;
        f.n[0] = (int64_t)size, f.n[1] = FSDPI_ST_HEADER;
        ok = fsdpi_st_fail(&r,
                           zip || pickle
                               ? "is no safetensors file, but one of torch.save (a pickle): write "
                                 "its tensors with safetensors.torch.save_file"
                               : "is no safetensors file: header of %0 bytes, at most %1",
                           f);
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
    const int other = e->dtype == FSDP_SAFETENSORS_OTHER; // then file_dtype tells which
    if ((!other && !fsdp_dtype_size(e->dtype)) || e->ndim < 0 || e->ndim > FSDP_MAX_DIMS) return 0;
    if (!other) e->file_dtype = 0;
    if (e->file_dtype < 0 || e->file_dtype >= FSDPI_ST_DTYPES) return 0;
    while (!other && fsdpi_st_dtypes[e->file_dtype].dtype != e->dtype) e->file_dtype++;
    if (fsdpi_st_dtypes[e->file_dtype].dtype != e->dtype) return 0;
    for (int d = 0; d < e->ndim; d++) {
        int64_t size = e->shape[d], most = FSDPI_ST_MOST;
        if (size < 0 || size > most || !fsdpi_st_numel(&numel, (uint64_t)size)) return 0;
        if (!sharded) continue;
        if (fsdpi_st_is_told(e)) most = e->whole[d];
        if (most < 0 || most > FSDPI_ST_MOST || size > most || e->start[d] < 0 ||
            e->start[d] > most - size)
            return 0;
    }
    if (!fsdpi_st_numel(&numel, fsdpi_st_dtypes[e->file_dtype].bits) || numel % 8) return 0;
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
