/* torch's CPU allocator with malloc: preloaded by `make sanitize`.  Some builds of torch carry an allocator of their own
 * (mimalloc), where AddressSanitizer does not see the end of a tensor. */
#include <stdlib.h>

void *alloc_cpu(size_t bytes) __asm__("_ZN3c109alloc_cpuEm"); /* c10::alloc_cpu(size_t) */
void free_cpu(void *data) __asm__("_ZN3c108free_cpuEPv");     /* c10::free_cpu(void *) */

void *alloc_cpu(size_t bytes) {
    void *data = NULL;
    if (bytes && posix_memalign(&data, 64, bytes)) abort();
    return data;
}

void free_cpu(void *data) { free(data); }
