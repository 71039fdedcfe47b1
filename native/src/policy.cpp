#include "policy.h"

namespace moe_pager {

const std::vector<std::string> & policy_names() {
    static const std::vector<std::string> names = { "posterior", "lru", "lfu", "static" };
    return names;
}

std::string listed(const std::vector<std::string> & names) {
    std::string text;
    for (const auto & name : names) {
        text += (text.empty() ? "" : ", ") + name;
    }
    return text;
}

std::unique_ptr<policy> make_policy(const std::string & name) {
    if (name == "posterior") {
        return make_policy_posterior();
    }
    if (name == "lru") {
        return make_policy_lru();
    }
    if (name == "lfu") {
        return make_policy_lfu();
    }
    if (name == "static") {
        return make_policy_static();
    }
    return nullptr;
}

} // namespace moe_pager
