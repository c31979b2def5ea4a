// Stands in front of libtritonserver, and refuses what its older releases do not survive and what is
// not for everybody.
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
// - Loading and unloading models. Triton restricts them and the index together, and health checks ask
//   for the index: so these endpoints are open, and it is here that whoever loads or unloads must show
//   the run's key. Headers do not get this far, and an unload has no parameters that do, so the key
//   comes in the model's name, `KEY:MODEL`. Tickets, files that allow one call each, would keep it off
//   the wire; but whoever calls first takes one, so anybody could have a recovery fail. Backends call
//   the same functions for a model's own `pb_utils.load_model`: they are known by where they return.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !defined(MAX_ELEMENTS) || !defined(KEY_VARIABLE)
#error "the build names MAX_ELEMENTS and KEY_VARIABLE"
#endif

void note_front_end(void);  // locks.c

#define EXPORTED __attribute__((visibility("default")))

// An address in whoever called the exported function in which this stands.
#define CALLER __builtin_return_address(0)

enum { INVALID_ARG = 3, UNSUPPORTED = 5 };  // TRITONSERVER_ERROR_* of tritonserver.h

typedef struct TRITONSERVER_Error Error;
typedef struct TRITONSERVER_InferenceRequest Request;
typedef struct TRITONSERVER_Parameter Parameter;
typedef struct TRITONSERVER_Server Server;
typedef Error* (*NewError)(uint32_t, const char*);
typedef Error* (*AddInput)(Request*, const char*, uint32_t, const int64_t*, uint64_t);
typedef uint32_t (*ByteSize)(uint32_t);
typedef Error* (*Control)(Server*, const char*);
typedef Error* (*ControlWith)(Server*, const char*, const Parameter**, uint64_t);

static NewError new_error;
static AddInput add_input;
static ByteSize byte_size;
static Control load, unload, unload_with_dependents;
static ControlWith load_with_parameters;
static const char* key;  // NULL: nobody has it

// Finds what it stands in front of. In a process without libtritonserver nobody calls it.
__attribute__((constructor)) static void find(void)
{
    new_error = (NewError)dlsym(RTLD_NEXT, "TRITONSERVER_ErrorNew");
    add_input = (AddInput)dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestAddInput");
    byte_size = (ByteSize)dlsym(RTLD_NEXT, "TRITONSERVER_DataTypeByteSize");
    load = (Control)dlsym(RTLD_NEXT, "TRITONSERVER_ServerLoadModel");
    load_with_parameters =
        (ControlWith)dlsym(RTLD_NEXT, "TRITONSERVER_ServerLoadModelWithParameters");
    unload = (Control)dlsym(RTLD_NEXT, "TRITONSERVER_ServerUnloadModel");
    unload_with_dependents =
        (Control)dlsym(RTLD_NEXT, "TRITONSERVER_ServerUnloadModelAndDependents");
    key = getenv(KEY_VARIABLE);
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

// Whether this is an address in a backend, whose library Triton wants to have such a name.
static int is_in_backend(const void* address)
{
    Dl_info info;
    if (!dladdr(address, &info)) {
        return 0;
    }
    const char* slash = strrchr(info.dli_fname, '/');
    const char* file = slash ? slash + 1 : info.dli_fname;
    return strncmp(file, "libtriton_", strlen("libtriton_")) == 0;
}

EXPORTED Error* TRITONSERVER_InferenceRequestAddInput(
    Request* request, const char* name, uint32_t datatype, const int64_t* shape, uint64_t num_dims)
{
    static _Thread_local int is_known;
    if (!is_known) {
        is_known = 1;
        if (!is_in_backend(CALLER)) {  // whose threads may do so for a model
            note_front_end();
        }
    }
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

// What follows the key in `KEY:MODEL`; NULL where that is not what it is. How long the comparison
// takes says nothing about the key but its length, which everybody knows.
static const char* after_key(const char* name)
{
    const size_t size = key ? strlen(key) : 0;
    if (size == 0 || strnlen(name, size + 1) <= size || name[size] != ':') {
        return NULL;
    }
    unsigned char difference = 0;
    for (size_t i = 0; i < size; ++i) {
        difference |= (unsigned char)(name[i] ^ key[i]);
    }
    return difference ? NULL : name + size + 1;
}

// The model that `caller` may load or unload under this name; NULL where it may not.
static const char* controlled(const char* name, const void* caller)
{
    return is_in_backend(caller) ? name : after_key(name);
}

static Error* restricted(void)
{
    return new_error(
        UNSUPPORTED,
        "loading and unloading models is restricted: name the model KEY:MODEL, with the key of the "
        "run, or use `charonia reload` [charonia:not_supported]");
}

EXPORTED Error* TRITONSERVER_ServerLoadModel(Server* server, const char* name)
{
    const char* model = controlled(name, CALLER);
    return model ? load(server, model) : restricted();
}

EXPORTED Error* TRITONSERVER_ServerLoadModelWithParameters(
    Server* server, const char* name, const Parameter** parameters, uint64_t num_parameters)
{
    const char* model = controlled(name, CALLER);
    return model ? load_with_parameters(server, model, parameters, num_parameters) : restricted();
}

EXPORTED Error* TRITONSERVER_ServerUnloadModel(Server* server, const char* name)
{
    const char* model = controlled(name, CALLER);
    return model ? unload(server, model) : restricted();
}

EXPORTED Error* TRITONSERVER_ServerUnloadModelAndDependents(Server* server, const char* name)
{
    const char* model = controlled(name, CALLER);
    return model ? unload_with_dependents(server, model) : restricted();
}
