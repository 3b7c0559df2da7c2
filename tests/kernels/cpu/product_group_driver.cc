// Prints the most inputs of a group of a product for each stride in bytes that is an argument.
#include <cstdio>
#include <cstdlib>

#include "product_args.h"

int main(int argc, char** argv) {
    for (int i = 1; i < argc; i++) std::printf("%lld ", (long long)jattn::product_group_of_stride(std::atoll(argv[i])));
}
