// Answer what the launcher's own functions make of command lines and files, one after the other.
//
// Compiled with launcher.c as a part of it. A request is a line with its kind and the number of its
// words, each of which a NUL follows; so are the parts of the answer:
//
//   arguments WORD...         VERB BUNDLE USUAL MAKER: what read_arguments finds
//   runtime-dir FOLDER        the same, after XDG_RUNTIME_DIR was set
//   search TRIGGERS CONFIG    "some" where config.json has a trigger string, "none" where it has none,
//                             "unknown" where the file of trigger strings isn't whole
#define main launcher_main
#include "launcher.c"
#undef main

static char *next_word(void)
{
    char *word = NULL;
    size_t size = 0;
    if (getdelim(&word, &size, '\0', stdin) < 0)
        exit(1);
    return word;
}

static void answer(const char *part)
{
    fwrite(part, 1, strlen(part) + 1, stdout);
}

static void read_words(int count, char **words)
{
    static const char *const verbs[] = {"", "pass", "create"};
    struct arguments found = read_arguments(count, words);
    answer(verbs[found.verb]);
    answer(found.bundle);
    answer(found.is_usual ? "usual" : "");
    answer(found.maker == NULL ? "" : found.maker);
}

static void search(const char *named, const char *searched)
{
    static char buffer[CACHE_MOST];
    int file = open(named, O_RDONLY), other = open(searched, O_RDONLY);
    ssize_t length = read_all(file, buffer, sizeof buffer);
    trigger_count = trigger_longest = 0;
    memset(pairs, 0, sizeof pairs);
    if (length < 0 || !read_triggers((struct text){buffer, (size_t)length}))
        answer("unknown");
    else
        answer(has_no_trigger(other) ? "none" : "some");
    close(file);
    close(other);
}

int main(void)
{
    char kind[32];
    int count;
    find_self("probe");
    while (scanf("%31s %d", kind, &count) == 2 && getchar() == '\n') {
        char **words = calloc((size_t)count + 1, sizeof *words);
        for (int at = 0; at < count; at++)
            words[at] = next_word();
        if (strcmp(kind, "arguments") == 0)
            read_words(count, words);
        else if (strcmp(kind, "runtime-dir") == 0)
            setenv("XDG_RUNTIME_DIR", words[0], 1);
        else if (strcmp(kind, "search") == 0)
            search(words[0], words[1]);
        fflush(stdout);
        for (int at = 0; at < count; at++)
            free(words[at]);
        free(words);
    }
    return 0;
}
