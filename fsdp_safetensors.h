/* fsdp_safetensors.h - the safetensors format: headers read and written, checksums, and what two
   boxes of a tensor share; an extension of fsdp.h

   A file of this format is a number of 8 bytes, a header of that many bytes (JSON), and the data.
   The header has the range of each tensor in the data. One file may hold parts of tensors, boxes;
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
           int64_t data = w.end; // bytes after the header
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
     Checksums: fsdp_crc32c. Boxes: fsdp_box_begin, fsdp_box_next. JSON: fsdp_json_parse and more.
     All of it compiles with FSDP_MATH_ONLY. No function calls anything but mem* and str*.
   WHICH FILES ARE TAKEN
     Those that safetensors 0.8 takes, with these exceptions: a name has 1 to 4,096 bytes, no NUL,
     and stands once; an entry is an object; a size is at most 2^62; DCP_SHARDING_INFO is checked; a
     number that means nothing may be too large for a double.
   TEXTS OF FAILURES
     They have no rank and no file: print them after the name of a file. Bytes "of the data" are
     counted from the end of the header, all others from the beginning of the file. */
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
    int32_t ndim;                 // in the file; shape, start, whole hold the first FSDP_MAX_DIMS
    int64_t shape[FSDP_MAX_DIMS]; // the box's
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

/* fsdp_safetensors_header_bytes - get the number of bytes of a file's header
   first       the first 8 bytes of the file; not read if file_bytes is less
   header_bytes  out: bytes of the header, which follows those 8; then the data follows
   why         [why_cap] what is wrong, if the result is CORRUPT; else ""
   Result      FSDP_OK; CORRUPT (the file is shorter than 8 bytes, or than 8 and the header; more
               than 100,000,000 bytes); INVALID_ARG (NULL, a negative size)
   Thread      any */
FSDP_API fsdp_status fsdp_safetensors_header_bytes(const void *first, int64_t file_bytes,
                                                   int64_t *header_bytes, char *why,
                                                   size_t why_cap);

/* fsdp_safetensors_parse - check a header and list its tensors. Call it twice: to measure, and with
   room
   header      [header_bytes], from byte 8 of the file on
   data_bytes  bytes after the header; the tensors must cover each exactly once
   entries, text   NULL: it checks what it can without memory, and measures. Else room as info told
               for the same header, and it checks everything. Entries come in the order of their
               bytes; text has to live as long as their names
   info        out; all 0 after a failure
   why         [why_cap] what is wrong and where, if the result is CORRUPT; else ""
   Result      FSDP_OK; CORRUPT; INVALID_ARG (NULL, a negative size); UNSUPPORTED (a big-endian
               host)
   Allocates   no (stack: less than 2 KiB)      Thread any
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
   Thread      any
   Source      safetensors: prepare; torch: HuggingFaceStorageWriter */
FSDP_API int64_t fsdp_safetensors_print(fsdp_safetensors_entry *entries, int64_t num, int sharded,
                                        const char *const *keys, const char *const *values,
                                        int num_pairs, char *buf, int64_t cap);

/* fsdp_safetensors_dtype_name - "F32", "F8_E4M3", ... of entry.file_dtype; "?" if it is none
   Thread      any */
FSDP_API const char *fsdp_safetensors_dtype_name(int32_t file_dtype);

/* -------------------------------------------------------------------------------------------- */
/* Checksums.                                                                                     */

/* fsdp_crc32c - the CRC-32C (Castagnoli) of more bytes. By an instruction where the processor has
   one, else by a table
   crc         0, or the CRC of the bytes before these
   nbytes      0 or less: none
   Result      that of "123456789" is 0xe3069283
   Thread      any */
FSDP_API uint32_t fsdp_crc32c(uint32_t crc, const void *data, int64_t nbytes);

/* -------------------------------------------------------------------------------------------- */
/* Boxes: an interval of each dim of a tensor.                                                    */

// The intersection of two boxes: `rows` runs of `elements` that are contiguous in both.
typedef struct fsdp_box_overlap {
    int64_t rows, elements;                         // rows 0: nothing
    int64_t src, dst;                               // this run's offset in each box, elements
    int32_t outer, reserved;                        // dims that are stepped through
    int64_t size[FSDP_MAX_DIMS], at[FSDP_MAX_DIMS]; // [outer] size of the intersection; run's place
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
   Thread      any
   Source      torch: _shards_get_overlap_region_wrt_saved_tensor */
FSDP_API void fsdp_box_begin(int ndim, const int64_t *src_start, const int64_t *src_shape,
                             const int64_t *dst_start, const int64_t *dst_shape,
                             fsdp_box_overlap *out);
FSDP_API int fsdp_box_next(fsdp_box_overlap *overlap);

/* -------------------------------------------------------------------------------------------- */
/* JSON: small files next to the tensors, such as config.json.                                    */

enum { FSDP_JSON_NONE, FSDP_JSON_NULL, FSDP_JSON_FALSE, FSDP_JSON_TRUE, FSDP_JSON_NUMBER,
       FSDP_JSON_STRING, FSDP_JSON_LIST, FSDP_JSON_OBJECT };

// A value in a text. It owns nothing: the text has to live as long.
typedef struct fsdp_json {
    const char *text;
    int64_t begin, end;      // its bytes there, with quotes and brackets
    int32_t kind, reserved;  // FSDP_JSON_*; NONE: there is no value
} fsdp_json;

/* fsdp_json_parse - check a whole text and return its value
   text        [nbytes] JSON (RFC 8259) in UTF-8, with at most 127 levels
   why         [why_cap] what is wrong and at which byte, if the result is CORRUPT; else ""
   Result      FSDP_OK; CORRUPT; INVALID_ARG (NULL, a negative size)
   Allocates   no; it does not recurse      Thread any */
FSDP_API fsdp_status fsdp_json_parse(const char *text, int64_t nbytes, fsdp_json *value, char *why,
                                     size_t why_cap);

/* fsdp_json_next - step through an object or a list
   in          a value of these functions
   key         out: the member's name; of a list, kind NONE. May be NULL
   value       in: kind NONE for the first, else the one before. Out: the next, or kind NONE
   Result      1; 0: there is no more, or `in` is neither
   Thread      any */
FSDP_API int fsdp_json_next(const fsdp_json *in, fsdp_json *key, fsdp_json *value);

/* fsdp_json_find - get the member of an object; of several with one name the last, as in Python
   value       out: kind NONE if there is none
   Result      1; 0: there is none, or `in` is no object
   Thread      any */
FSDP_API int fsdp_json_find(const fsdp_json *in, const char *name, fsdp_json *value);

/* fsdp_json_string - decode a string
   to          [cap] out: terminated; whole characters, as many as fit; "" if it is no string
   Result      its bytes once decoded, which may have NULs among them; -1: no string
   fsdp_json_int    - get an integer, written without fraction and exponent, -2^62 .. 2^62
   fsdp_json_double - get a number. With at most 15 digits and a power of ten of at most 22 it is
               the nearest double, else it may differ in the last digits of 17
   Result      1; 0: it is none, or too large; then *out is as before
   Thread      any */
FSDP_API int64_t fsdp_json_string(const fsdp_json *value, char *to, size_t cap);
FSDP_API int fsdp_json_int(const fsdp_json *value, int64_t *out);
FSDP_API int fsdp_json_double(const fsdp_json *value, double *out);

// clang-format on
#ifdef __cplusplus
}
#endif
#endif // FSDP_SAFETENSORS_H

/* ============================================================================================ */
/* Implementation: the parts that no other part includes. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_SAFETENSORS_IMPLEMENTED)
#define FSDP_SAFETENSORS_IMPLEMENTED
#include "src/safetensors/values.h"
#include "src/safetensors/write.h"
#endif // FSDP_IMPLEMENTATION
