/* A driver library that only needs to be found, mounted and loaded: it has no code.
 *
 * It is built once; the SONAME is patched for each library. The note says "GNU/Linux", as in
 * NVIDIA's thread-local-storage library, because other container tools require that. */
__asm__(".pushsection .note.ABI-tag, \"a\", @note\n"
        ".balign 4\n"
        ".long 4, 16, 1\n" /* name size, description size, NT_GNU_ABI_TAG */
        ".asciz \"GNU\"\n"
        ".long 0, 2, 3, 99\n" /* Linux 2.3.99 */
        ".popsection\n");

__attribute__((visibility("default"))) const char gpuhook_simulated[] = "gpuhook";
