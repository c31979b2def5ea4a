// Stands in front of libtritonserver and refuses what its older releases do not survive.
//
// Loaded by LD_PRELOAD, these functions are found before those of the same names in libtritonserver,
// which tritonserver's front ends call for every request, by whatever protocol it came.
//
// - The shape of an input. Release 24.10 multiplies its dimensions without a look at the overflow, so
//   2^62 INT32 "have" no bytes, pass, and end the Python backend's process; and its HTTP front end
//   makes a buffer of the announced size for values in JSON, so 2^40 of them end the server, and 2^33
//   take its memory.
// - The size of an element, which is 0 for strings: the front ends divide by it when a client asks for
//   the classification of an output.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifndef MAX_ELEMENTS
#error "the build names MAX_ELEMENTS"
#endif

#define EXPORTED __attribute__((visibility("default")))

enum { INVALID_ARG = 3 };  // TRITONSERVER_ERROR_INVALID_ARG of tritonserver.h

typedef struct TRITONSERVER_Error Error;
typedef struct TRITONSERVER_InferenceRequest Request;
typedef Error* (*NewError)(uint32_t, const char*);
typedef Error* (*AddInput)(Request*, const char*, uint32_t, const int64_t*, uint64_t);
typedef uint32_t (*ByteSize)(uint32_t);

static NewError new_error;
static AddInput add_input;
static ByteSize byte_size;

// Finds what it stands in front of. In a process without libtritonserver nobody calls it.
__attribute__((constructor)) static void find(void)
{
    new_error = (NewError)dlsym(RTLD_NEXT, "TRITONSERVER_ErrorNew");
    add_input = (AddInput)dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestAddInput");
    byte_size = (ByteSize)dlsym(RTLD_NEXT, "TRITONSERVER_DataTypeByteSize");
}

// Whether a tensor of this shape is small enough. Triton itself refuses dimensions below 0.
static int is_small(const int64_t* shape, uint64_t num_dims)
{
    int64_t num_elements = 1;  // never above MAX_ELEMENTS, so the product is below its square
    for (uint64_t i = 0; i < num_dims; ++i) {
        if (shape[i] > MAX_ELEMENTS) {
            return 0;
        }
        num_elements *= shape[i] > 0 ? shape[i] : 1;
        if (num_elements > MAX_ELEMENTS) {
            return 0;
        }
    }
    return 1;
}

EXPORTED Error* TRITONSERVER_InferenceRequestAddInput(
    Request* request, const char* name, uint32_t datatype, const int64_t* shape, uint64_t num_dims)
{
    if (is_small(shape, num_dims)) {
        return add_input(request, name, datatype, shape, num_dims);
    }
    char text[512];
    snprintf(
        text, sizeof(text),
        "the shape of input '%.200s' has too many elements; at most %" PRId64
        " are accepted [charonia:invalid_request]",
        name, (int64_t)MAX_ELEMENTS);
    return new_error(INVALID_ARG, text);
}

EXPORTED uint32_t TRITONSERVER_DataTypeByteSize(uint32_t datatype)
{
    uint32_t size = byte_size(datatype);
    return size ? size : 1;
}
