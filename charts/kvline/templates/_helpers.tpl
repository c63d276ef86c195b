{{/* The operator's permissions in the namespaces that it reconciles. No secrets, logs or exec. tests/integration/test_rights.py checks that each one is used. */}}
{{- define "kvline.rules" -}}
- apiGroups: [serving.kvline.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [kvline.dev] # the kind's earlier group, to say that its services are not reconciled
  resources: [inferenceservices]
  verbs: [list]
- apiGroups: [serving.kvline.dev]
  resources: [inferenceservices/status, inferenceservices/scale] # scale: with spec.autoscaling
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, create, delete]
- apiGroups: [resource.k8s.io] # only for services with gpuDeviceClass
  resources: [resourceclaimtemplates]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [rbac.authorization.k8s.io] # which release has a namespace
  resources: [rolebindings]
  resourceNames: [kvline-operator]
  verbs: [get]
{{- end }}
{{/* An image by digest, of global.imageRegistry where that is set. */}}
{{- define "kvline.image" -}}
{{- $image := get .values.image .name }}
{{- if and (not .values.image.allowTags) $image (not (contains "@sha256:" $image)) }}
{{- fail (printf "image.%s must be name@sha256:<64 hex>, got %s; image.allowTags is for development" .name $image) }}
{{- end }}
{{- $path := splitList "/" $image }}
{{- $host := first $path }}
{{- if and (gt (len $path) 1) (or (contains "." $host) (contains ":" $host) (eq "localhost" $host)) }}
{{- $path = rest $path }}
{{- else }}
{{- $host = "" }}
{{- end }}
{{- $path = prepend $path (.values.global.imageRegistry | default $host) | compact }}
{{- join "/" $path }}
{{- end }}
{{/* Names of Secrets, which users write as NAME or as {name: NAME}; as JSON. */}}
{{- define "kvline.secrets" -}}
{{- $names := list }}
{{- range . }}
{{- $names = append $names (kindIs "string" . | ternary . (get (kindIs "string" . | ternary dict .) "name")) }}
{{- end }}
{{- toJson (uniq $names) }}
{{- end }}
{{/* Labels or annotations, whose values are text. */}}
{{- define "kvline.texts" -}}
{{- range $key, $value := . }}
{{ $key | quote }}: {{ $value | toString | quote }}
{{- end }}
{{- end }}
